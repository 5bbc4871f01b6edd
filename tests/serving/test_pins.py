"""Which versions rollouts may still ask for."""

from __future__ import annotations

from pathlib import Path

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallStart, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url


async def test_a_rollout_that_began_too_long_ago_holds_no_version(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        async with Recorder(store, merged=False) as recorder:
            for n, at in ((0, 1000.0), (7, 5000.0)):
                name = RolloutName(f"r{n}")
                await recorder.start(CallStart(f"c{n}", name, "chat/completions", "policy", n, {"messages": []}, at))
        assert [await store.rollouts.opened_for(f"r{n}") for n in (0, 7)] == [(None, 0), (None, 7)]
        for since, wanted in ((400.0, {0, 7}), (3400.0, {7}), (5400.0, set())):
            assert await store.versions.pinned(since) == wanted
