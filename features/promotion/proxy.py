"""Plugs the gate in: new versions of the policy are tested before they go live (`promotion.mode: gated`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...proxy.plugins.hooks import Core, Hooks, ProxyPlugin
from .beside import PromotionBeside
from .config import PromotionConfig
from .gate import Gate
from .promotions import NOT_GATED, Promotions
from .splitting import PolicySplit, candidates_server


class PromotionPlugin(ProxyPlugin):
    """Splits new rollouts between the live version and a candidate, and decides which stays."""

    beside = PromotionBeside

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, store = self.config, core.store
        tests = Promotions(store.database)
        if not config.section(PromotionConfig).is_gated:
            await tests.end(NOT_GATED)
            yield Hooks()
            return
        split = PolicySplit(config, tests)
        gate = Gate(config, store, tests)
        yield Hooks(choose=split, placed=candidates_server(config, tests), on_deleted=split.forget, work=(gate.run,))


plugin = PromotionPlugin
