"""Whose rewards act on everybody is known to all who ask at once, also just after the rules changed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import Reward, RolloutName, Sender
from lightning_proxy.core.returns import Rules
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url


async def test_a_change_of_rules_forgets_no_evaluator(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        await store.rollouts.open([(RolloutName("r"), "hash")], {})
        for evidence in (True, False):
            await store.rewards.post([Reward("r", 1.0, final=False)], by=Sender("key", evidence=evidence))
        for i in range(10):
            await store.returns.use(Rules({"reward": 1.0, f"style-{i}": 1.0}))
            await asyncio.gather(*(store.trust.whose() for _ in range(4)))
            assert await store.trust.whose() == "evaluators'"
