"""DPPO by KL: drops tokens if their probability diverged too far in the direction of their update (`trainer.loss`).

    loss = -M · sg(r) · A · log p,   M = 0 where (p - q) · A > 0 and D > mask.kl, else 1;   r = p / q
    D = q · log(q / p) + (1 - q) · log((1 - q) / (1 - p))

p is the token's probability under the trained weights, q the one it was sampled with, and sg is stop-gradient. D is the
KL divergence of the binary choice between this token and all others. `mask.kl` is 0.05 in the authors' runs. All
tensors are (A, L): A answers of at most L tokens. Source: arXiv 2602.04879, equation 12, binary KL; verl's `dppo_kl`,
without its cap of r at 20, which the paper does not have.

By hand, A = 1: q = 0.5 and p = 0.6 have D = 0.5 · log(0.5 / 0.6) + 0.5 · log(0.5 / 0.4) = 0.0204.
The loss is -1.2 · log 0.6. p = 0.7 has D = 0.0872, so the loss is 0. With A = -1 and p = 0.7, it is 1.4 · log 0.7: an
update that pulls p back is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...trainer.step.losses import LossInputs
from .config import AlgorithmsConfig

TINY = 1e-8  # keeps the logarithm of the other tokens' probability finite


def dppo_kl(given: LossInputs) -> Tensor:
    """Return the loss of each token: (A, L)."""
    logp, logq = given.logprobs.detach(), given.sampled_logprobs
    p, q = logp.exp(), logq.exp()
    divergence = q * (logq - logp) + (1 - q) * ((1 - q + TINY) / (1 - p + TINY)).log()
    kept = ((p - q) * given.advantages <= 0) | (divergence <= given.config.section(AlgorithmsConfig).mask.kl)
    return torch.where(kept, -given.ratios * given.advantages * given.logprobs, 0.0)
