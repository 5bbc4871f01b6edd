"""Adds to each token's advantage what guides say of it, such as the policy itself after a hint, or a teacher."""

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
        said = answers.take(padded([_said(sample, i) for sample in samples], there.device))
        gap = (said - logprobs.detach()).clamp(-limit, limit).nan_to_num(nan=0.0)
        weights = torch.tensor([s.guidance[i].weight if i < len(s.guidance) else 0.0 for s in samples])
        total += weights.to(there.device)[answers.rows] * gap
        gaps += gap
        guides += ~said.isnan()
    inputs["guided"] = (guides > 0) & there
    inputs["guidance"] = total.where(inputs["guided"], 0.0)
    inputs["guide_gap"] = (gaps / guides.clamp(min=1)).where(inputs["guided"], 0.0)
    inputs["advantages"] = inputs["advantages"] + inputs["guidance"]


def _said(sample: Sample, guide: int) -> Sequence[float]:
    """What a sample's guide of that number says; NaN throughout without one."""
    return sample.guidance[guide].logprobs if guide < len(sample.guidance) else (math.nan,) * len(sample.mask)
