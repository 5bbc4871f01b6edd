"""Adds guides' log-probabilities to the tokens' advantages: those of the policy after a hint, or of a teacher."""

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
    """Add weight · clip(guide's log-probability - the policy's, -limit, limit) to the advantages, for each guide.

    Such an advantage is that of the reverse KL: its policy gradient brings the policy nearer to the guide (SDPO, arXiv
    2601.20802). `logprobs`: the policy's, (A, L). `inputs` get `guidance`, what is added; `guided`, where a guide
    spoke; and `guide_gap`, the mean clipped difference there. All are (A, L).
    """
    there = inputs["completion_mask"].bool()
    total, gaps, guides = (torch.zeros_like(inputs["advantages"]) for _ in range(3))
    for i in range(max((len(sample.guidance) for sample in samples), default=0)):
        guide = answers.take(padded([_guide_logprobs(sample, i) for sample in samples], there.device))
        gap = (guide - logprobs.detach()).clamp(-limit, limit).nan_to_num(nan=0.0)
        weights = torch.tensor([s.guidance[i].weight if i < len(s.guidance) else 0.0 for s in samples])
        total += weights.to(there.device)[answers.rows] * gap
        gaps += gap
        guides += ~guide.isnan()
    inputs["guided"] = (guides > 0) & there
    inputs["guidance"] = total.where(inputs["guided"], 0.0)
    inputs["guide_gap"] = (gaps / guides.clamp(min=1)).where(inputs["guided"], 0.0)
    inputs["advantages"] = inputs["advantages"] + inputs["guidance"]


def _guide_logprobs(sample: Sample, guide: int) -> Sequence[float]:
    """The log-probabilities of a sample's guide of that number; NaN throughout without one."""
    return sample.guidance[guide].logprobs if guide < len(sample.guidance) else (math.nan,) * len(sample.mask)
