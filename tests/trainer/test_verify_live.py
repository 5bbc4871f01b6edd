"""Merged weights of one server: they are live at once, and verified before weights move again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import VllmServer
from support.training import bench, require_seen_clearly


async def test_an_idle_trainer_verifies_what_is_live(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "merged") as b:
        await b.groups("t1", "t2")
        stop = asyncio.Event()
        training = asyncio.create_task(b.loop().run(stop))
        async with asyncio.timeout(60):
            while not (live := await b.store.versions.live()).verified or not live.version:
                assert not training.done()
                await asyncio.sleep(0.01)
        await require_seen_clearly(b.store, 1)
        stop.set()
        await training


async def test_a_version_made_live_by_hand_while_the_old_one_is_verified_stays_live(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path, "merged") as b:
        loop, sample = b.loop(), VllmServer.sample
        await loop.resume()
        await b.groups("t1", "t2")
        assert await loop.train_once()
        assert not (await b.store.versions.live()).verified

        async def rolls_back(*given: Any) -> Any:
            swap = Swap(b.store, b.vllm, "merged", b.config.policy.directory)
            if (await b.store.versions.live()).version:
                await swap.activate(await b.store.versions.get(0))
            return await sample(*given)

        monkeypatch.setattr(VllmServer, "sample", rolls_back)
        await b.groups("t3", "t4")
        await loop.train_once()
        versions = await b.store.versions.all()
        assert [(v.version, v.status, v.verified) for v in versions] == [
            (0, "live", True), (1, "ready", False), (2, "failed", False)
        ]  # fmt: skip
