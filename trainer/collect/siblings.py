"""Reads rollouts from the store as siblings: with their calls and all their rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from ...core.config.trainer import MIN_EARLIER, TrainerConfig
from ...core.errors import NotFound
from ...core.records import ModelCall, Reward, Rollout
from ...store.store import Store
from ..credit.air import air_rewards
from ..credit.strategies import training_rules
from ..types import RolloutRewards, Sibling, Sift, Sifted

# Takes a rollout's calls and rewards, and returns scores of the calls that have none yet. Raises JudgeError.
AskJudge = Callable[[Sequence[ModelCall], Sequence[Reward]], Awaitable[list[Reward]]]


class Siblings:
    """Reads rollouts, and the earlier ones that a rollout without siblings is compared with."""

    def __init__(self, config: TrainerConfig, store: Store, judge: AskJudge | None, sift: Sift | None) -> None:
        self._config = config
        self._store = store
        self._judge = judge
        self._sift = sift or Sifted
        self._failed_count = config.failed_reward is not None
        self._rules = training_rules(config)

    async def read(self, rollout: Rollout) -> Sibling | None:
        """Return the rollout with its stored rewards (a judge's earlier scores included) and automatic ones.

        None if the rollout was deleted meanwhile.
        """
        with suppress(NotFound):
            return await self._scored(rollout, await self._store.rewards.of(rollout.rollout_id))
        return None

    async def judged(self, rollout: Rollout, sibling: Sibling) -> Sibling | None:
        """Return the rollout with the judge's scores of all its calls. Raise JudgeError if no answer comes."""
        if self._judge is None:
            return sibling
        with suppress(NotFound):
            rewards = await self._store.rewards.of(rollout.rollout_id)
            return await self._scored(rollout, rewards + await self._judge(sibling.calls, rewards))
        return None

    async def earlier(self, rollout: Rollout, known: dict[str, Sibling]) -> list[Sibling]:
        """Return the running baseline: earlier rewarded rollouts, of the same task if there are enough, else of all.

        At most `running_window` of them; none if there are fewer than MIN_EARLIER. Only the store is asked, so a
        restart changes nothing. `known` has the rollouts read for this step so far; those read here are added to it.
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
        sifted = self._sift(await self._store.calls.of(rollout.rollout_id))
        rewards = RolloutRewards.counted(posted, self._rules, rollout.status)
        return Sibling(sifted.calls, replace(rewards, air=air_rewards(sifted.calls, self._config.air)), sifted)
