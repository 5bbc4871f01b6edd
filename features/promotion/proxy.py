"""Plugs the gate in: new versions of the policy are tested before they go live (`promotion.mode: gated`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from ...core.config.root import Config
from ...core.records import PolicyVersion, RolloutName
from ...proxy.api.policy import Policy, VersionSeen
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from .config import PromotionConfig
from .gate import Gate
from .promotions import NOT_GATED, Promotion, Promotions, candidates_server

KEPT = 20_000  # rollouts whose version is in memory


class PolicySplit:
    """Chooses the version that answers a rollout: the live one, or, from its first call on, the candidate."""

    def __init__(self, config: Config, tests: Promotions) -> None:
        self._config, self._tests = config, tests
        self._versions: dict[str, tuple[int, int]] = {}  # test and version, by rollout

    async def __call__(self, rollout: RolloutName, live: PolicyVersion) -> PolicyVersion:
        trial = await self._tests.now()
        if trial is None or trial.promotion.against != live.version or rollout.mode == "eval":
            return live
        test = trial.promotion
        n, version = self._versions.get(rollout.rollout_id, (None, live.version))
        if n != test.n:
            version = await self._tests.assign(test, rollout, self._config)
            if len(self._versions) >= KEPT:
                self._versions.clear()  # the store knows them
            self._versions[rollout.rollout_id] = test.n, version
        return trial.candidate if version == test.version else live

    def forget(self, rollout_id: str) -> None:
        """Drop the version of a deleted rollout. A new one of the same name is split anew."""
        self._versions.pop(rollout_id, None)


class PolicyTest(BaseModel):
    """`promotion`: whether new versions are tested before they go live. `test`: the one that is under way."""

    promotion: Literal["immediate", "gated"]
    test: Promotion | None


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
        split, work = PolicySplit(config, tests), (Gate(config, store, tests).run,)
        yield Hooks(choose=split, placed=candidates_server(config, tests), on_deleted=split.forget, work=work)

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        under_way = await Promotions(store.database).under_way() if key_id is None else None
        return {
            "promotion": self.config.section(PromotionConfig).mode,
            "test": under_way and asdict(under_way),
        }

    async def version_fields(self, store: Store, key_id: str | None) -> Callable[[int], Fields]:
        tests = await Promotions(store.database).last() if key_id is None else {}
        return lambda version: {"promotion": tests.get(version)}


plugin = PromotionPlugin
