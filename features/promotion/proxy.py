"""Plugs the gate in: new versions of the policy are tested before they go live (`promotion.mode: gated`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from ...core.records import PolicyVersion, RolloutName
from ...proxy.api.policy import Policy, VersionSeen
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from .config import PromotionConfig
from .gate import Gate
from .promotions import NOT_GATED, Promotion, Promotions, candidates_server


class PolicyTest(BaseModel):
    """`promotion`: whether new versions are tested before they go live. `test`: the one that is under way."""

    promotion: Literal["immediate", "gated"]
    test: Promotion | None


class VersionTest(BaseModel):
    """`promotion`: its last test against a live version, with the numbers; null without one."""

    promotion: Promotion | None


class PromotionPlugin(ProxyPlugin):
    fields = ((Policy, PolicyTest), (VersionSeen, VersionTest))

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, store = self.config, core.store
        tests = Promotions(store.database)
        if not config.section(PromotionConfig).is_gated:
            await tests.end(NOT_GATED)
            yield Hooks()
            return

        async def choose(rollout: RolloutName, live: PolicyVersion) -> PolicyVersion:
            now = await tests.now()
            if now is None or now.promotion.against != live.version or rollout.mode == "eval":
                return live
            version = await tests.assign(now.promotion, rollout, config)
            return now.candidate if version == now.promotion.version else live

        gate = Gate(config, store, tests)
        yield Hooks(choose=choose, placed=candidates_server(config, tests), work=(gate.run,))

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        under_way = await Promotions(store.database).under_way() if key_id is None else None
        return {"promotion": self.config.section(PromotionConfig).mode, "test": under_way and asdict(under_way)}

    async def version_fields(self, store: Store, key_id: str | None) -> Callable[[int], Fields]:
        tests = await Promotions(store.database).last() if key_id is None else {}
        return lambda version: {"promotion": tests.get(version)}


plugin = PromotionPlugin
