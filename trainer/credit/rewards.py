"""The rewards of a rollout as the trainer counts them: named rewards, times their weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...proxy.config.trainer import TrainerConfig
from ...proxy.types import Reward
from ..types import RolloutRewards

JUDGE = "judge"  # the name of a judge's rewards
# A larger reward counts as this, so that sums and squares of rewards stay finite.
LARGEST = 1e30


def reward_weights(config: TrainerConfig) -> dict[str, float]:
    """Return the weight of each reward name, the judge's included."""
    return {**config.reward_weights, **({JUDGE: config.judge.weight} if config.judged else {})}


def weighted_rewards(rewards: Sequence[Reward], weights: Mapping[str, float]) -> RolloutRewards:
    """Return the weighted sum of each name's newest reward, per call and for the rollout. Oldest reward first.

    Names without a weight do not count.
    """
    newest = {(r.call_id, r.name): r.value for r in rewards if r.name in weights}
    summed: dict[str | None, float] = {}
    for (call_id, name), value in newest.items():
        weighted = max(-LARGEST, min(weights[name] * value, LARGEST))
        summed[call_id] = summed.get(call_id, 0.0) + weighted
    final = summed.pop(None, None)
    return RolloutRewards(final, {call_id: value for call_id, value in summed.items() if call_id is not None})
