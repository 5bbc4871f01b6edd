"""DPPO by total variation: drops tokens if their probability moved too far in the update's direction (`trainer.loss`).

    loss = -M · sg(r) · A · log p,   M = 0 where (p - q) · sign(A) > mask.tv, else 1;   r = p / q

p is the token's probability under the trained weights, q the one it was sampled with, and sg is stop-gradient. |p - q|
is the total variation of the binary choice between this token and all others. Limits on the ratio suit neither likely
nor rare tokens: a change from 0.99 to 0.8 is a ratio of 0.81, one from 1e-5 to 1e-3 is a ratio of 100. `mask.tv` is
0.15 in the authors' runs. All tensors are (A, L): A answers of at most L tokens. Source: arXiv 2602.04879, equation
12, binary TV; verl's `dppo_tv`, without its cap of r at 20, which the paper does not have.

By hand, q = 0.5: with A = 1, the loss is -1.2 · log 0.6 for p = 0.6, and 0 for p = 0.7. With A = -1 and p = 0.7 it is
1.4 · log 0.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...trainer.step.losses import LossInputs
from .config import AlgorithmsConfig


def dppo_tv(given: LossInputs) -> Tensor:
    """Return the loss of each token: (A, L)."""
    moved = given.logprobs.detach().exp() - given.sampled_logprobs.exp()
    kept = moved * given.advantages.sign() <= given.config.section(AlgorithmsConfig).mask.tv
    return torch.where(kept, -given.ratios * given.advantages * given.logprobs, 0.0)
