"""Adds a guide's log-probabilities, such as a teacher's, to the tokens' advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import Sample
from .losses import Answers, padded


def add_guidance(
    inputs: dict[str, Tensor], samples: Sequence[Sample], answers: Answers, logprobs: Tensor, limit: float
) -> None:
    """Add weight · clip(guide's log-probability - the policy's, -limit, limit) to the advantages.

    Such an advantage is that of the reverse KL: its policy gradient brings the policy nearer to the guide (MiniLLM,
    arXiv 2306.08543). `logprobs`: the policy's, (A, L). `inputs` get `guidance`, what is added; `guided`, where the
    guide spoke; and `guide_gap`, the clipped difference there. All are (A, L).
    """
    there = inputs["completion_mask"].bool()
    said = [s.guidance.logprobs if s.guidance else (math.nan,) * len(s.mask) for s in samples]
    guide = answers.take(padded(said, there.device))
    weights = torch.tensor([s.guidance.weight if s.guidance else 0.0 for s in samples], device=there.device)
    inputs["guided"] = ~guide.isnan() & there
    inputs["guide_gap"] = (guide - logprobs.detach()).clamp(-limit, limit).where(inputs["guided"], 0.0)
    inputs["guidance"] = weights[answers.rows] * inputs["guide_gap"]
    inputs["advantages"] = inputs["advantages"] + inputs["guidance"]
