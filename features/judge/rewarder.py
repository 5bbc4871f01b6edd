"""Defines what a rewarder is: it sees ended rollouts, and gives scores with reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...core.config.rollouts import RewardsConfig
from ...core.errors import Unprocessable

Json = dict[str, Any]
T = TypeVar("T")


class Away(Exception):
    """A rewarder cannot work for now: its model is away, its file broken, its budget spent. Rollouts wait for it."""


class NoReward(Exception):
    """A rewarder failed for a rollout. It is not asked about it again."""


@dataclass(frozen=True, slots=True)
class GivenScore:
    """One reward. Without a `name` it has the rewarder's; without a `call_id` it is the rollout's own."""

    value: float
    comment: str | None = None
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What one rollout is given by `source`: scores, perhaps none, or the `error` that the rewarder ended with."""

    source: str
    scores: Sequence[GivenScore] = ()
    error: str | None = None


class Rewarder:
    """Rewards ended rollouts, which are as `GET /rollouts/{id}?requests=whole` shows them. It posts nothing.

    `name`: of its scores. `label`: its place in the configuration. `in_groups`: it is to see siblings together.
    `at_once`: how many rollouts, or groups, it is worth reading at once.
    """

    name: str
    label: str
    at_once: int
    in_groups = False

    async def check(self) -> None:
        """Raise Away, or ConfigError, if it cannot begin."""

    async def require(self) -> None:
        """Raise Away if nothing can be asked for now, before rollouts are read."""

    async def source(self) -> str:
        """Return the `source` of its scores: the rewarder, and the version of its question. Raise Away."""
        raise NotImplementedError

    async def reward(self, rollouts: Sequence[Json]) -> list[Given]:
        """Return what each rollout is given, in their order; all of it or, with Away, nothing."""
        return await together(self._given(rollout) for rollout in rollouts)

    async def scores(self, rollout: Json) -> Sequence[GivenScore]:
        """Return what one rollout is given. Raise NoReward, Away."""
        raise NotImplementedError

    def tokens(self, rollouts: Sequence[Json]) -> int:
        """Return about how many tokens a model would read to reward this group."""
        return 0

    async def close(self) -> None:
        """End what it started."""

    async def _given(self, rollout: Json) -> Given:
        source = await self.source()
        try:
            return Given(source, await self.scores(rollout))
        except NoReward as error:
            return Given(source, error=str(error))


def within(given: Given, name: str, rewards: RewardsConfig) -> Given:
    """Return what was given; with the error instead if a value is outside of `rewards.range`."""
    try:
        for score in given.scores:
            rewards.require(score.value, score.name or name)
    except Unprocessable as error:
        return Given(given.source, error=error.message)
    return given


def price_line(rollouts: int, tokens: int) -> str:
    """Return what it takes to reward so many rollouts."""
    return f"{rollouts:,} rollouts: about {tokens:,} tokens" if tokens else f"{rollouts:,} rollouts"


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
