"""What a rewarder is: it sees ended rollouts, and gives rewards with reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ...core.config.rollouts import RewardsConfig
from ...core.errors import Unprocessable
from ...core.records import Reward

Json = dict[str, Any]
T = TypeVar("T")


class Away(Exception):
    """A rewarder cannot work for now: its model is away, its file broken, its budget spent. Rollouts wait for it."""


class NoReward(Exception):
    """A rewarder failed for a rollout. It is not asked about it again."""


class GivenScore(NamedTuple):
    """One reward. Without a `name` it has the rewarder's; without a `call_id` it is the rollout's own."""

    value: float
    comment: str | None = None
    call_id: str | None = None
    name: str | None = None


class Given(NamedTuple):
    """What one rollout is given: rewards, perhaps none, or the `error` that the rewarder ended with."""

    rewards: Sequence[Reward] = ()
    error: str | None = None


class Rewarder:
    """Rewards ended rollouts, which are as `GET /rollouts/{id}?requests=whole` shows them. It posts nothing.

    `name`: of its rewards. `label`: its place in the configuration. `in_groups`: it is to see siblings together.
    `at_once`: how many rollouts, or groups, it is worth reading at once.
    """

    in_groups = False

    def __init__(self, name: str, label: str, at_once: int, rewards: RewardsConfig) -> None:
        self.name, self.label, self.at_once, self._rewards = name, label, at_once, rewards

    async def check(self) -> None:
        """Raise Away, or ConfigError, if it cannot begin."""

    async def source(self) -> str:
        """Return the `source` of its rewards: the rewarder, and the version of its question. Raise Away."""
        raise NotImplementedError

    async def reward(self, rollouts: Sequence[Json]) -> list[Given]:
        """Return what each rollout of a group is given, in their order; all of it or, with Away, nothing."""
        source, given = await self.source(), []
        for rollout, scores in zip(rollouts, await self.group(rollouts), strict=True):
            error, rewards = (scores, []) if isinstance(scores, str) else (None, scores)
            made = [
                Reward(rollout["rollout_id"], one.value, one.call_id, one.name or self.name, source, one.comment, False)
                for one in rewards
            ]
            try:
                for one in made:
                    self._rewards.require(one.reward, one.name)
            except Unprocessable as outside:
                made, error = [], outside.message
            given.append(Given(made, error))
        return given

    async def group(self, rollouts: Sequence[Json]) -> list[Sequence[GivenScore] | str]:
        """Return the scores of each rollout of a group, or why it has none. Raise Away."""
        return await together(self._or_why_not(rollout) for rollout in rollouts)

    async def scores(self, rollout: Json) -> Sequence[GivenScore]:
        """Return what one rollout is given. Raise NoReward, Away."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what it started."""

    async def _or_why_not(self, rollout: Json) -> Sequence[GivenScore] | str:
        try:
            return await self.scores(rollout)
        except NoReward as error:
            return str(error)


def decisions(rollout: Json) -> list[Json]:
    """Return the calls that were answered and not sent again."""
    return [call for call in rollout["calls"] if call["status"] == "ok" and call["superseded_by"] is None]


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Do several things at once, each to its end; then raise the first error."""
    found: list[T] = []
    for one in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found
