"""What a rollout was rewarded with: named rewards by their weights, and what automatic rewarding adds. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ...proxy.types import Reward

# A larger reward counts as this: sums and squares of rewards stay finite.
LARGEST = 1e30


@dataclass(frozen=True, slots=True)
class RolloutRewards:
    """`final`: posted for the rollout as a whole, None if nothing was; `calls`: posted for single calls, by call id.

    `air`: what automatic intermediate rewarding adds to calls, by call id; never in place of what was posted.
    """

    final: float | None
    calls: Mapping[str, float] = field(default_factory=dict)
    air: Mapping[str, float] = field(default_factory=dict)

    @property
    def posted(self) -> float | None:
        """The rollout's own reward, or else the sum of its calls'; None without any."""
        if self.final is not None:
            return self.final
        return math.fsum(self.calls.values()) if self.calls else None

    @property
    def total(self) -> float:
        """The return of the rollout as a whole."""
        return (self.posted or 0.0) + math.fsum(self.air.values())

    def of(self, call_ids: Set[str]) -> RolloutRewards:
        """The rollout's own reward, and those of some of its calls."""
        calls, air = ({c: value for c, value in all_.items() if c in call_ids} for all_ in (self.calls, self.air))
        return RolloutRewards(self.final, calls, air)

    def of_call(self, call_id: str) -> float:
        return self.calls.get(call_id, 0.0) + self.air.get(call_id, 0.0)


def weighted_rewards(rewards: Sequence[Reward], weights: Mapping[str, float]) -> RolloutRewards:
    """Of each call, and of the rollout, the weighted sum of the newest reward of each name; oldest reward first.

    Names without a weight do not count.
    """
    newest = {(r.call_id, r.name): r.value for r in rewards if r.name in weights}
    summed: dict[str | None, float] = {}
    for (call_id, name), value in newest.items():
        weighted = max(-LARGEST, min(weights[name] * value, LARGEST))
        summed[call_id] = summed.get(call_id, 0.0) + weighted
    final = summed.pop(None, None)
    return RolloutRewards(final, {call_id: value for call_id, value in summed.items() if call_id is not None})
