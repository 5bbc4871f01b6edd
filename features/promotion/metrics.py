"""Reads one metric off a rollout, and compares two groups of siblings by it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...core.returns import LARGEST, Rules, earned
from ...core.statistics import difference, sign_difference
from .config import PromotionConfig
from .tests import Observed

UNCUT = (-LARGEST, LARGEST)  # a gate has a range of its own
TRAINED = "reward"  # what the trainer counts: named rewards, times their weights

Value = Callable[[Observed], float | None]


class GuardedMetric(NamedTuple):
    """A metric that must not become worse. `value`: that of a rollout, None if it has none.

    `range`: its lowest and highest value; None where it has no bounds, so that only the order of two values counts.
    `is_reward`: higher is better, and a failed rollout has the lowest value. Of all others lower is better.
    """

    name: str
    margin: float
    value: Value
    range: tuple[float, float] | None = (0.0, 1.0)
    is_reward: bool = False

    def of(self, rollout: Observed) -> float | None:
        """Return the rollout's value; None if it has none, or none yet."""
        if self.is_reward and self.range is not None and rollout.status == "failed":
            return self.range[0]
        return self.value(rollout)

    def difference(self, candidate: Sequence[float], live: Sequence[float]) -> float:
        """Return how far the candidate's siblings are better than those of the live version: one pair, in [-1, 1]."""
        better, other = (candidate, live) if self.is_reward else (live, candidate)
        return sign_difference(better, other) if self.range is None else difference(better, other, *self.range)

    def is_clipped(self, value: float) -> bool:
        """Return whether a value is outside the range."""
        return self.range is not None and not self.range[0] <= value <= self.range[1]


def _answer_tokens(rollout: Observed) -> float | None:
    return rollout.tokens / rollout.calls if rollout.calls else None


# Metrics that need no reward: the share of failed tool calls, of answers that were cut off, and of rollouts without a
# reward; tokens of an answer, and milliseconds until it was complete, on average over the rollout's calls.
OWN: Mapping[str, tuple[Value, tuple[float, float] | None]] = {
    "tool_errors": (lambda rollout: rollout.tool_errors or 0.0, (0.0, 1.0)),
    "truncated": (lambda rollout: rollout.truncated, (0.0, 1.0)),
    "unrewarded": (lambda rollout: float(rollout.status == "completed" and not rollout.rewards), (0.0, 1.0)),
    "answer_tokens": (_answer_tokens, None),
    "latency": (lambda rollout: rollout.latency_ms, None),
}


def metrics(gate: PromotionConfig, weights: Mapping[str, float]) -> list[GuardedMetric]:
    """Return the metrics of a gate. `weights`: of rewards, as the trainer counts them."""
    found = []
    for name, margin in gate.metrics.items():
        if name in OWN:
            value, bounds = OWN[name]
            found.append(GuardedMetric(name, margin, value, bounds))
        else:
            counted = dict(weights) if name == TRAINED else {name: 1.0}
            bounds = gate.reward_ranges.get(name, gate.reward_range)
            found.append(GuardedMetric(name, margin, _rewarded(counted), bounds, is_reward=True))
    return found


def _rewarded(weights: Mapping[str, float]) -> Value:
    return lambda rollout: earned(rollout.rewards, Rules(weights, within=UNCUT)).returned
