"""Plugs the rewarders in, for whose rewards completed rollouts wait, and the queue of people who rate."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from pydantic import BaseModel

from ...proxy.api.policy import Policy
from ...proxy.api.status import Status
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from . import routes
from .config import JudgeConfig
from .kinds import check, made
from .scoring import Scorer
from .table import spent_by_each

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

    async def check(self) -> None:
        await check(self.config)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, rewarders = self.config, []
        for name, one in config.section(JudgeConfig).rewarders(config.rewards):
            rewarders.append(made(name, one, config, core.store.database))
            if one.model is not None:
                where = urlsplit(one.address).hostname
                log.info("judge.use: %s: %s at %s reads rollouts", one.kind, one.model, where)
        first = rewarders[0].label if rewarders else None
        await core.store.rollouts.use_function(config.rewards.function or first)
        if rewarders:
            yield Hooks(work=(Scorer(config, core.store, rewarders, core.metrics.rewards.inc).run,))
        else:
            yield Hooks()

    async def status_fields(self, store: Store, key_id: str | None) -> Fields:
        return {"spent": [] if key_id is not None else await spent_by_each(store.database)}

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        found = await routes.rewarders_seen(self.config, store.database)
        return {"warnings": [one.warning for one in found if one.warning]}


plugin = RewardersPlugin
