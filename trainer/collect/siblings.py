"""Rollouts as they are compared: read from the store with their calls and all that they were rewarded with."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ...proxy.config.trainer import MIN_EARLIER, TrainerConfig
from ...proxy.errors import NotFound
from ...proxy.store.store import Store
from ...proxy.types import Reward, Rollout
from ..credit.air import air_rewards
from ..credit.rewards import RolloutRewards, weighted_rewards
from ..credit.strategies import Sibling
from ..judge.judge import JUDGE, Judge


class Siblings:
    """Reads rollouts, and the earlier ones that a rollout without siblings is compared with."""

    def __init__(self, config: TrainerConfig, store: Store) -> None:
        self._config = config
        self._store = store
        self._failed_count = config.failed_reward is not None
        self._judge = Judge(config, store) if config.judged else None
        self._weights = reward_weights(config)

    async def read(self, rollout: Rollout) -> Sibling | None:
        """The rollout with what was posted for it, what a judge said before, and automatic intermediate rewards.

        None if it was deleted meanwhile.
        """
        with suppress(NotFound):
            return await self._scored(rollout, await self._store.rewards.of(rollout.rollout_id))
        return None

    async def judged(self, rollout: Rollout, sibling: Sibling) -> Sibling | None:
        """The same, with the judge's scores of all its calls; raises JudgeError if there is no answer."""
        if self._judge is None:
            return sibling
        with suppress(NotFound):
            rewards = await self._store.rewards.of(rollout.rollout_id)
            return await self._scored(rollout, rewards + await self._judge.missing(sibling.calls, rewards))
        return None

    async def earlier(self, rollout: Rollout, known: dict[str, Sibling]) -> list[Sibling]:
        """The running baseline: rewarded rollouts opened before this one, of its task if enough are, else of all.

        At most `running_window`, none if there are fewer than MIN_EARLIER. Nothing is kept but the store itself, so a
        restart changes nothing. `known`: rollouts that were read for this step already, to which these are added.
        """
        for task_id in dict.fromkeys((rollout.task_id, None)):
            found = await self._store.waiting.earlier(
                rollout.rollout_id, task_id, self._config.running_window, self._failed_count
            )
            for missing in (r for r in found if r.rollout_id not in known):
                if read := await self.read(missing):
                    known[missing.rollout_id] = read
            siblings = [known[r.rollout_id] for r in found if r.rollout_id in known]
            siblings = [s for s in siblings if s.rewards.posted is not None]
            if len(siblings) >= MIN_EARLIER:
                return siblings
        return []

    async def _scored(self, rollout: Rollout, posted: list[Reward]) -> Sibling:
        calls = await self._store.calls.of(rollout.rollout_id)
        rewards = self._failed(rollout, weighted_rewards(posted, self._weights))
        return Sibling(calls, replace(rewards, air=air_rewards(calls, self._config.air)))

    def _failed(self, rollout: Rollout, rewards: RolloutRewards) -> RolloutRewards:
        """What a failed rollout counts for, unless it was rewarded as a whole before."""
        penalty = self._config.failed_reward
        if rollout.status != "failed" or penalty is None or rewards.final is not None:
            return rewards
        return replace(rewards, final=penalty)


def reward_weights(config: TrainerConfig) -> dict[str, float]:
    """What the rewards of each name count, a judge's scores included."""
    return {**config.reward_weights, **({JUDGE: config.judge.weight} if config.judged else {})}
