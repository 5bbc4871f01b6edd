"""Merged weights of one server: they are live at once, and verified by agents' answers before weights move again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.errors import PublishError
from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import VllmServer
from lightning_proxy.trainer.verify import Verification, WeightEvidence
from support.training import Bench, DeafServer, bench, require_seen_clearly


def never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked(*_: Any) -> Any:
        raise AssertionError("vLLM was asked")

    monkeypatch.setattr(VllmServer, "sample", asked)


@asynccontextmanager
async def first_version(base: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Bench, Any]]:
    """A loop after its first step; version 1 is live and not verified, and agents have its answers."""
    async with bench(base, tmp_path, "merged", **settings) as b:
        loop = b.loop()
        await loop.resume()
        await b.groups("t1", "t2")
        assert await loop.train_once()
        live = await b.store.versions.live()
        assert (live.version, live.verified) == (1, False)
        for task in ("t3", "t4") * 4:
            await b.sampled(task, version=1)
        yield b, loop


@asynccontextmanager
async def running(base: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    """A trainer that runs; version 1 is live."""
    async with bench(base, tmp_path, "merged", group_size=16) as b:
        await b.groups("t1", "t2")
        stop = asyncio.Event()
        training = asyncio.create_task(b.loop().run(stop))
        while (await b.store.versions.live()).version == 0:
            assert not training.done()
            await asyncio.sleep(0.01)
        yield b
        stop.set()
        await training


async def until_verified(b: Bench) -> None:
    async with asyncio.timeout(60):
        while not (await b.store.versions.live()).verified:
            await asyncio.sleep(0.01)
    assert "verify_deviations" in (await b.store.steps.newest(1))[0].metrics


async def test_the_answers_of_agents_verify_a_version_and_vllm_is_not_asked(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_asked(monkeypatch)
    async with first_version(base, tmp_path) as (b, loop):
        assert await loop.train_once()
        assert (await b.store.versions.get(1)).verified
        await require_seen_clearly(b.store, 1)
        assert (await b.store.versions.live()).version == 2


async def test_a_trainer_that_waits_for_rollouts_verifies_meanwhile(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_asked(monkeypatch)
    monkeypatch.setattr("lightning_proxy.trainer.publish.QUIET_S", 3600.0)
    async with running(base, tmp_path) as b:
        for _ in range(16):
            await b.sampled("t3", version=1)  # one group, and a step takes two
        await until_verified(b)
        assert len(await b.store.steps.newest(10)) == 1


async def test_a_version_that_answers_nobody_is_verified_by_asking_after_a_while(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.publish.QUIET_S", 0.1)
    async with running(base, tmp_path) as b:
        await until_verified(b)
        await require_seen_clearly(b.store, 1)


async def test_a_version_made_live_by_hand_while_the_old_one_is_verified_stays_live(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with first_version(base, tmp_path) as (b, loop):

        async def rolls_back(*_: Any) -> bool:
            await Swap(b.store, b.vllm, "merged", b.config.policy.directory).activate(await b.store.versions.get(0))
            return False

        monkeypatch.setattr(Verification, "by_agents", rolls_back)
        await loop.train_once()
        versions = await b.store.versions.all()
        assert [(v.version, v.status, v.verified) for v in versions] == [
            (0, "live", True), (1, "ready", False), (2, "failed", False)
        ]  # fmt: skip


async def test_a_name_is_no_proof_where_agents_got_the_old_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tells_nothing(*_: Any) -> WeightEvidence:
        return WeightEvidence()

    monkeypatch.setattr(Verification, "_ask", tells_nothing)
    async with first_version(base, tmp_path, server=DeafServer) as (_, loop):
        with pytest.raises(PublishError, match="agents got answers from the previous weights"):
            await loop.train_once()
