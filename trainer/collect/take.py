"""The part of the store that a step takes: samples, rollouts to mark, counts to report. Plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from ...core.groups import Group
from ...core.records import Rollout
from ...store.training import CallCredit, ComparedGroup
from ..report.batch_metrics import Seen, sample_metrics, staleness_metrics
from ..types import Sample, Sibling


class TrainingMember(NamedTuple):
    """A rollout that a step may train on."""

    rollout: Rollout
    sibling: Sibling


@dataclass(frozen=True, slots=True)
class ComparedRollouts:
    """Rollouts that are compared with each other. `known` were looked at before: they only count in the baseline.

    `owner`: the key that all were opened with, if it sees only its own.
    """

    members: Sequence[TrainingMember]
    known: Sequence[Sibling] = ()
    owner: str | None = None


@dataclass(slots=True)
class Take:
    """The part of a step that comes from some groups, which are those `waiting` for it, and how these are compared.

    `base`: the policy version that the step trains on from.
    """

    base: int
    waiting: list[Group] = field(default_factory=list)
    comparisons: list[ComparedRollouts] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    groups: list[ComparedGroup] = field(default_factory=list)
    credit: list[CallCredit] = field(default_factory=list)
    compared: int = 0  # rollouts, the loss's divisor
    compared_by_adapter: Counter[str] = field(default_factory=Counter)
    seen: Seen = field(default_factory=Seen)
    earlier: dict[str, Sibling] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        return self.seen.counts

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        return tuple(rollout.rollout_id for rollout in self.rollouts)

    def drop(self, reason: str, rollouts: Iterable[Rollout]) -> None:
        rollout_ids = [r.rollout_id for r in rollouts]
        self.dropped.setdefault(reason, []).extend(rollout_ids)
        self.counts["rollouts_dropped"] += len(rollout_ids)

    def add(self, other: Take) -> None:
        """Add what comes from other groups."""
        self.waiting += other.waiting
        self.samples += other.samples
        self.rollouts += other.rollouts
        self.staleness += other.staleness
        self.groups += other.groups
        self.credit += other.credit
        self.compared += other.compared
        self.compared_by_adapter += other.compared_by_adapter
        self.seen.add(other.seen)
        for reason, rollout_ids in other.dropped.items():
            self.dropped.setdefault(reason, []).extend(rollout_ids)

    @property
    def why_nothing(self) -> str:
        """Return why nothing was taken, as a line for the log."""
        reasons = ", ".join(f"{reason} ({len(ids)})" for reason, ids in self.dropped.items() if ids)
        rewards = [reward for of_task in self.seen.rewards.values() for reward in of_task]
        mean = f" of mean reward {fmean(rewards):.3g}" if rewards else ""
        return f"nothing to learn from {self.counts['rollouts_dropped']} rollouts{mean}: {reasons}"

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the rollouts that are trained on. `seen` has those of all that were looked at."""
        taken = {rollout.rollout_id for rollout in self.rollouts}
        return {
            "groups_trained": float(sum(not taken.isdisjoint(group.rollout_ids) for group in self.groups)),
            "rollouts_trained": float(len(self.rollouts)),
            **staleness_metrics(self.staleness),
            **sample_metrics(self.samples),
        }


def together(takes: Sequence[Take]) -> Take:
    """Return several takes, at least one, as one, which has none of their comparisons."""
    joined = Take(takes[0].base)
    for take in takes:
        joined.add(take)
    return joined
