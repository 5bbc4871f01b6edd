"""Plugs the rewarders in, for whose rewards completed rollouts wait, and the queue of people who rate."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ...core.prices import Prices
from ...proxy.plugins.hooks import Core, Hooks, ProxyPlugin
from . import rating, routes
from .beside import RewardersBeside
from .config import JudgeConfig
from .kinds import check, made, readers
from .scoring import Scorer
from .table import StoredAnswers

log = logging.getLogger(__name__)


class RewardersPlugin(ProxyPlugin):
    """Asks `rewards.function` and `judge.use` about completed rollouts."""

    routers = (routes.router, rating.router)
    beside = RewardersBeside

    async def check(self) -> None:
        await check(self.config)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        keys = self.config.section(JudgeConfig)
        rewarders_of = keys.rewarders(self.config.rewards)
        answers = partial(StoredAnswers, core.store.database, budget=keys.budget, prices=Prices(self.config.prices))
        rewarders = [made(name, one, self.config, answers(name, one)) for name, one in rewarders_of]
        for line in readers(rewarders_of, self.config.section(JudgeConfig).calls.model):
            log.info("%s", line)
        names = [rewarder.label for rewarder in rewarders]
        await core.store.endings.use_function(self.config.rewards.function or next(iter(names), None))
        if rewarders:
            yield Hooks(work=(Scorer(self.config, core.store, rewarders, core.metrics.rewards.inc).run,))
        else:
            yield Hooks()


plugin = RewardersPlugin
