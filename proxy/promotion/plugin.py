"""Plugs the gate in: new versions of the policy are tested before they go live (`policy.promotion: gated`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ..plugins.hooks import Core, Hooks, ProxyPlugin
from ..store.resources.promotions import NOT_GATED
from ..store.store import Store
from .gate import Gate, rules
from .splitting import PolicySplit, candidates_server


class PromotionPlugin(ProxyPlugin):
    """Splits new rollouts between the live version and a candidate, and decides which stays."""

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, store = self.config, core.store
        if not config.policy.is_gated:
            await store.promotions.end(NOT_GATED)
            yield Hooks()
            return
        split = PolicySplit(config, store)
        weighed = rules(config.policy.gate, config.trainer)
        gate = Gate("gate", store.promotions, store.database, weighed, partial(stopped, store))
        yield Hooks(choose=split, placed=candidates_server(config, store), on_deleted=split.forget, work=(gate.run,))


async def stopped(store: Store) -> str | None:
    """Return why no candidate goes live by itself: a new live version would lift the stop, which only a person may."""
    return None if await store.steps.collapse() is None else "publication is stopped for a collapse"


plugin = PromotionPlugin
