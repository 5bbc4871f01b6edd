"""Plugs the gate in: new versions of the policy are tested before they go live (`policy.promotion: gated`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ..gate.gate import Gate, rules
from ..plugins.hooks import Core, Hooks, ProxyPlugin
from ..store.store import Store
from .beside import PromotionBeside
from .config import GateKeys
from .promotions import NOT_GATED, Promotions
from .splitting import PolicySplit, candidates_server


class PromotionPlugin(ProxyPlugin):
    """Splits new rollouts between the live version and a candidate, and decides which stays."""

    beside = PromotionBeside

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, store = self.config, core.store
        tests = Promotions(store.database)
        policy = GateKeys.of(config.policy)
        if not policy.is_gated:
            await tests.end(NOT_GATED)
            yield Hooks()
            return
        split = PolicySplit(config, tests)
        weighed = rules(policy.gate, config.trainer)
        gate = Gate("gate", tests, store.database, weighed, partial(stopped, store))
        yield Hooks(choose=split, placed=candidates_server(config, tests), on_deleted=split.forget, work=(gate.run,))


async def stopped(store: Store) -> str | None:
    """Return why no candidate goes live by itself: a new live version would lift the stop, which only a person may."""
    return None if await store.steps.collapse() is None else "publication is stopped for a collapse"


plugin = PromotionPlugin
