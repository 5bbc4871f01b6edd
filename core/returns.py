"""The return of a rollout: the one number that the trainer learns from, and that everything else shows. Pure.

A rollout's return is its own reward, or else the sum of its calls'. Each of these is the weighted sum of the newest
reward of each name in `trainer.reward_weights`. With weights {"reward": 1, "style": 0.5}, the posts

    call a: reward 1, then reward 0, then style 1        call b: reward 1

give 0.5 for a and 1 for b, so 1.5 for the rollout. A later reward of 3 for the rollout itself becomes its return.
A reward with the weight 0 counts as 0, one without a weight not at all. Rewards of repeated calls count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .config.rollouts import DEFAULT_RANGE
from .config.trainer import TrainerConfig
from .records import Reward, RolloutStatus

# Larger rewards count as this, so that sums and squares of rewards stay finite.
LARGEST = 1e30


class Rules(NamedTuple):
    """How rewards count. `failed`: the reward of a failed rollout that got none of its own; None: no reward.

    `within`: `rewards.range`. Stored rewards outside this range count as its nearer end.
    """

    weights: Mapping[str, float]
    failed: float | None = None
    within: tuple[float, float] = DEFAULT_RANGE

    @classmethod
    def of(cls, config: TrainerConfig) -> Rules:
        """Return the rules of a trainer's configuration. A judge's scores do not count here, only in training."""
        return cls(config.reward_weights, config.failed_reward, config.reward_range)


@dataclass(frozen=True, slots=True)
class Earned:
    """The weighted rewards of a rollout: its `own`, if it has one, and those of its calls, by call id."""

    own: float | None
    calls: Mapping[str, float] = field(default_factory=dict)

    @property
    def returned(self) -> float | None:
        """Return the rollout's own reward, or else the sum of its calls'; None if there are none."""
        return return_of(self.own, self.calls.values())


def return_of(own: float | None, calls: Iterable[float]) -> float | None:
    if own is not None:
        return own
    values = [*calls]
    return math.fsum(values) if values else None


def earned(rewards: Iterable[Reward], rules: Rules, status: RolloutStatus = "completed") -> Earned:
    """Return what a rollout and its calls earned. `rewards`: oldest first; the newest per call and name counts."""
    (low, high), weights = rules.within, rules.weights
    newest = defaultdict[str | None, dict[str, float]](dict)
    for reward in rewards:
        if reward.name in weights:
            value = weights[reward.name] * max(low, min(reward.reward, high))
            newest[reward.call_id][reward.name] = max(-LARGEST, min(value, LARGEST))
    found = {call_id: math.fsum(values.values()) for call_id, values in newest.items()}
    own = found.pop(None, rules.failed if status == "failed" else None)
    return Earned(own, {call_id: value for call_id, value in found.items() if call_id is not None})
