"""PPO's clipped surrogate, written by hand.

trainer: {loss: "examples/hooks/loss.py:clipped", parameters: {clip: 0.2}}
"""

from __future__ import annotations

import torch

from lightning_proxy.trainer.step.losses import LossInputs


def clipped(given: LossInputs) -> torch.Tensor:
    """Return the loss of each token, (A, L): what is to become smaller."""
    ratios = (given.logprobs - given.sampled_logprobs).exp()
    clip = given.config.parameters.get("clip", 0.2)
    bounded = ratios.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratios * given.advantages, bounded * given.advantages)
