"""The metrics of a step's rollouts: rewards by task, groups, advantages, staleness, rows. Pure, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import fmean, pstdev

from ..rows.samples import merge_rate
from ..types import Sample
from .metric_schema import all_metrics

# The calls of trained agents are these; merged ones and the reasons of forks are among the first.
CALLS = (
    "calls", "calls_untrainable", "calls_not_followed", "calls_not_finite", "calls_other_tokens", "calls_ambiguous",
    "rows_too_long",
)  # fmt: skip
TASKS_KEPT = 100  # of which a step keeps the rewards, the newest
# A step says so if more than this share of calls is left out for how they were sampled.
MOST = 0.5
COUNTED = ("groups", "samples")  # the groups of metrics of which every count is reported, zeros too


@dataclass(slots=True)
class Seen:
    """The rewards by task (None: no task) and the counts of all rollouts that were read since the last step.

    `not_followed` counts the calls that are left out because of how they were sampled, by reason.
    """

    rewards: dict[str | None, list[float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    not_followed: Counter[str] = field(default_factory=Counter)

    @property
    def rollouts(self) -> int:
        return sum(map(len, self.rewards.values()))

    @property
    def groups(self) -> int:
        """Return the number of tasks with rewards. Rollouts without a task are in no group."""
        return sum(task_id is not None for task_id in self.rewards)

    def reward(self, task_id: str | None, reward: float | None) -> None:
        if reward is not None:
            self.rewards.setdefault(task_id, []).append(reward)

    def add(self, other: Seen) -> None:
        self.counts += other.counts
        self.not_followed += other.not_followed
        for task_id, rewards in other.rewards.items():
            self.rewards.setdefault(task_id, []).extend(rewards)

    def metrics(self) -> dict[str, float]:
        rewards = [reward for of_task in self.rewards.values() for reward in of_task] or [0.0]
        means = [fmean(rewards) for task_id, rewards in self.rewards.items() if task_id is not None]
        counted = [name for name, m in all_metrics().items() if m.unit == "count" and m.group in COUNTED]
        return {
            **{name: float(self.counts[name]) for name in counted},
            "reward_mean": fmean(rewards),
            "reward_std": pstdev(rewards),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            "reward_task_std": pstdev(means) if means else 0.0,
            "rollouts": float(self.rollouts),
            "merge_rate": merge_rate(self.counts),
            "not_followed_share": self._share,
        }

    @property
    def _share(self) -> float:
        """The share of calls that are left out because of how they were sampled."""
        return self.counts["calls_not_followed"] / max(1, sum(self.counts[name] for name in CALLS))

    def left_out(self) -> str | None:
        """Return a warning with the main reason if most calls are left out for how they were sampled, else None."""
        if self._share <= MOST or not self.not_followed:
            return None
        why, calls = self.not_followed.most_common(1)[0]
        return f"{self._share:.0%} of the calls are left out, {calls} of them because: {why}"

    def tasks(self) -> dict[str, dict[str, float]]:
        """Return the mean, spread and number of the rewards of each of the newest `TASKS_KEPT` tasks."""
        newest = [(task_id, rewards) for task_id, rewards in self.rewards.items() if task_id is not None][-TASKS_KEPT:]
        return {
            task_id: {"mean": fmean(rewards), "std": pstdev(rewards), "rollouts": float(len(rewards))}
            for task_id, rewards in newest
        }


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the number of rows, and the mean, spread and positive share of the trained tokens' advantages."""
    advantages = [value for sample in samples for value in compress(sample.advantages, sample.mask)] or [0.0]
    return {
        "samples": float(len(samples)),
        "advantage_mean": fmean(advantages),
        "advantage_std": pstdev(advantages),
        "advantage_positive": sum(value > 0 for value in advantages) / len(advantages),
    }


def staleness_metrics(staleness: Sequence[int]) -> dict[str, float]:
    """Return the mean and greatest staleness of the rollouts that are trained on, in policy versions."""
    return {"staleness_mean": fmean(staleness or [0]), "staleness_max": float(max(staleness, default=0))}
