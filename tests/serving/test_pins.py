"""Which versions rollouts may still ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallStart, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.serving import swap
from lightning_proxy.serving.swap import Pins
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.sections import PolicyConfig
from support.stores import store_url


async def test_a_rollout_that_began_too_long_ago_holds_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        async with Recorder(store, merged=False) as recorder:
            for n, at in ((0, 1000.0), (7, 5000.0)):
                name = RolloutName(f"r{n}")
                await recorder.start(CallStart(f"c{n}", name, "chat/completions", "policy", n, {"messages": []}, at))
        kept = Pins(store, PolicyConfig(pin_timeout_s=3600).pin_timeout_s)
        assert [await kept.of(f"r{n}") for n in (0, 7)] == [0, 7]
        for now, wanted in ((4000.0, {0, 7}), (7000.0, {7}), (9000.0, set())):
            monkeypatch.setattr(swap.time, "time", lambda now=now: now)
            assert await kept.in_use() == wanted
