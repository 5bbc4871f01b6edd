"""A test of a version before it goes live: its rollouts, sides and outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...core.records import Reward, RolloutStatus

Outcome = Literal["promoted", "rejected"]
PromotionStatus = Literal["testing", "promoted", "rejected", "ended"]


@dataclass(frozen=True, slots=True)
class Promotion:
    """A test of version `version` against the live version `against`. `evidence`: its numbers (docs/promotion.md).

    `ended`: not decided, but broken off, because somebody made a version live, for one. `reason` says why.
    """

    n: int
    version: int
    against: int
    status: PromotionStatus
    began_at: float
    decided_at: float | None = None
    reason: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


class Assigned(NamedTuple):
    """Where a rollout stands in a test, and the version that answers it. Not `compared`: left to the live version."""

    place: int
    version: int
    compared: bool


Chooser = Callable[[str | None, int], Assigned]  # by a rollout's task, and its place among those of the task


@dataclass(frozen=True, slots=True)
class Observed:
    """A rollout that is evidence in a test, as it is now. `rewards`: those that are evidence.

    `opened_by`: places are counted apart for each. `shown`: so many calls were answered by `version`, `mixed`: so many
    by another one. `truncated`, `tool_errors`: the share of answers that were cut off, and of tool calls that failed.
    """

    rollout_id: str
    task_id: str | None
    place: int
    version: int
    status: RolloutStatus
    created_at: float
    ended_at: float | None
    foreign_calls: int
    calls: int
    tokens: int
    mixed: int
    truncated: float | None
    latency_ms: float | None
    tool_errors: float | None
    rewards: tuple[Reward, ...] = ()
    opened_by: str = ""
    shown: int = 1
