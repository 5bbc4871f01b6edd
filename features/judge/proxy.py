"""Plugs the rewarders in, for whose rewards completed rollouts wait, and the queue of people who rate."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from pydantic import BaseModel

from ...core.prices import Prices
from ...proxy.api.policy import Policy
from ...proxy.api.status import Status
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from . import routes
from .config import JudgeConfig
from .kinds import check, made, readers
from .scoring import Scorer
from .table import StoredAnswers, last_check, spent_by_each

log = logging.getLogger(__name__)


class PolicyWarnings(BaseModel):
    """`warnings`: what to know of rewarders that train, and that nobody has found to agree with people."""

    warnings: list[str]


class Spent(BaseModel):
    name: str
    tokens: int
    usd: float


class StatusSpent(BaseModel):
    """`spent`: what the models of each rewarder have used and cost so far."""

    spent: list[Spent]


class RewardersPlugin(ProxyPlugin):
    """Asks `rewards.function` and `judge.use` about completed rollouts."""

    routers = (routes.router,)
    fields = ((Policy, PolicyWarnings), (Status, StatusSpent))
    _sources: dict[str, str] | None = None  # of those that train, by what `rewards check` calls them

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
        await core.store.rollouts.use_function(self.config.rewards.function or next(iter(names), None))
        if rewarders:
            yield Hooks(work=(Scorer(self.config, core.store, rewarders, core.metrics.rewards.inc).run,))
        else:
            yield Hooks()

    async def status_fields(self, store: Store, key_id: str | None) -> Fields:
        return {"spent": [] if key_id is not None else await spent_by_each(store.database)}

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        if self._sources is None:
            weights = self.config.trainer.reward_weights
            rewarders = self.config.section(JudgeConfig).rewarders(self.config.rewards)
            self._sources = {
                routes.called(self.config, name, one): await routes.source(self.config, name, one)
                for name, one in rewarders
                if weights.get(name) and one.judges
            }
        found = {kind: await last_check(store.database, by) for kind, by in self._sources.items()}
        return {"warnings": [line for kind, check in found.items() if (line := routes.warning(kind, check))]}


plugin = RewardersPlugin
