"""Opens a rewarder for a command, and reads rollouts as it is to see them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import typer

from ...commands.api_client import ApiClient, ApiError
from ...core.config.root import Config
from ...core.prices import Prices
from ...store.requests import full_calls
from .config import JudgeConfig
from .kinds import check, made, named
from .rewarder import Rewarder, price_line
from .table import KeptAnswers

GONE = 404
PRICED = 5  # groups whose questions are counted


@asynccontextmanager
async def opened(
    config: Config, which: str, shuffle: str = "", answers: KeptAnswers | None = None
) -> AsyncIterator[tuple[Rewarder, KeptAnswers]]:
    """Yield a rewarder of the configuration, and what its model has used in this run. Raise ConfigError.

    With `answers` of another one, both have one budget.
    """
    if which != "function":
        await check(config)
    name, one = named(config, which)
    answers = answers or KeptAnswers(name, one, config.section(JudgeConfig).budget, Prices(config.prices))
    rewarder = made(name, one, config, answers, shuffle)
    try:
        yield rewarder, answers
    finally:
        await rewarder.close()


async def read_rollouts(api: ApiClient, rollout_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return rollouts with full requests, without those that were deleted."""
    found = []
    for rollout_id in rollout_ids:
        try:
            rollout = await api.rollout(quote(rollout_id, safe=""))
        except ApiError as error:
            if error.status_code != GONE:
                raise
        else:
            found.append(rollout | {"calls": full_calls(rollout["calls"])})
    return found


async def say_price(api: ApiClient, rewarder: Rewarder, groups: Sequence[Sequence[str]], times: int = 1) -> None:
    """Say on standard error about how many tokens a model will read, so many times, by the first few groups."""
    first = groups[:PRICED]
    tokens = sum([rewarder.tokens(await read_rollouts(api, group)) for group in first])
    if tokens:
        rollouts = sum(map(len, groups))
        typer.echo(price_line(rollouts, times * tokens * rollouts // sum(map(len, first))), err=True)
