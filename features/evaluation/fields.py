"""Fields that evaluations add to answers of the core's routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from ...proxy.api.answers import Policy, VersionSeen
from .evaluations import HeldOut


class BestSeen(BaseModel):
    """The best version. `judged`: by held-out rollouts, or by those of training. `story` says it to people."""

    version: int
    judged: Literal["evaluation", "reward"]
    reward: float
    low: float | None
    high: float | None
    story: str


class PolicyWithBest(Policy):
    """`best`: the best version; `evaluation`: the one that began last."""

    best: BestSeen | None
    evaluation: HeldOut | None


@dataclass(frozen=True, kw_only=True)
class VersionWithEvaluation(VersionSeen):
    """A version. `evaluation`: on held-out tasks; null without one. `best`: it is the best that can be served."""

    evaluation: HeldOut | None
    best: bool
