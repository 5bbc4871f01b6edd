"""Plugs the gate in: new versions of the policy are tested before they go live (`promotion.mode: gated`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from ...proxy.api.policy import Policy, VersionSeen
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from .config import PromotionConfig
from .gate import Gate
from .promotions import NOT_GATED, Promotion, Promotions
from .splitting import PolicySplit, candidates_server


class PolicyTest(BaseModel):
    """`promotion`: whether new versions are tested before they go live. `test`: the one that is under way.

    `waiting`: the version that is tested next.
    """

    promotion: Literal["immediate", "gated"]
    test: Promotion | None
    waiting: int | None


class VersionTest(BaseModel):
    """`promotion`: its last test against a live version, with the numbers; null without one."""

    promotion: Promotion | None


class PromotionPlugin(ProxyPlugin):
    """Splits new rollouts between the live version and a candidate, and decides which stays."""

    fields = ((Policy, PolicyTest), (VersionSeen, VersionTest))

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

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        tests = Promotions(store.database)
        under_way, waiting = await tests.under_way(), await tests.waiting()
        return {
            "promotion": self.config.section(PromotionConfig).mode,
            "test": None if under_way is None or key_id is not None else asdict(under_way),
            "waiting": None if waiting is None else waiting.version,
        }

    async def version_fields(self, store: Store, key_id: str | None) -> Callable[[int], Fields]:
        tests = await Promotions(store.database).last() if key_id is None else {}
        return lambda version: {"promotion": tests.get(version)}


plugin = PromotionPlugin
