"""IcePop: drops tokens if their probabilities in trainer and server have a ratio outside a band (`trainer.loss`).

    loss = -M · sg(r) · A · log p,   M = 1 where mask.ratio_low <= r <= mask.ratio_high, else 0;   r = p / q

p is the token's probability under the trained weights, q the one it was sampled with, and sg is stop-gradient. The
paper's band is 0.5 to 5, which drops one or two tokens in a thousand; 0.5 to 2 made its runs unstable. The paper
takes r before the step's first update; here r also reflects weight updates since the answer. All tensors are (A, L): A
answers of at most L tokens. Source: Ring-1T, arXiv 2510.18855; slime's `icepop_function`.

By hand, A = 1 and q = 0.1: the loss is 0 for p = 0.04 (r = 0.4) and p = 0.6 (r = 6), and -2 · log 0.2 for p = 0.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...trainer.step.losses import LossInputs
from .config import AlgorithmsConfig


def icepop(given: LossInputs) -> Tensor:
    """Return the loss of each token: (A, L)."""
    band = given.config.section(AlgorithmsConfig).mask
    kept = (given.ratios >= band.ratio_low) & (given.ratios <= band.ratio_high)
    return torch.where(kept, -given.ratios * given.advantages * given.logprobs, 0.0)
