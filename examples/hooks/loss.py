"""PPO's clipped surrogate, written by hand.

trainer: {loss: "examples/hooks/loss.py:clipped"}
"""

from __future__ import annotations

import torch

from lightning_proxy.trainer.step.losses import LossInputs

CLIP = 0.2


def clipped(given: LossInputs) -> torch.Tensor:
    """Return the loss of each token, (A, L): what is to become smaller."""
    ratios = (given.logprobs - given.sampled_logprobs).exp()
    bounded = ratios.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratios * given.advantages, bounded * given.advantages)
