"""What a killed or stopped trainer leaves behind, and that the next one goes on from there."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.errors import ConfigError, StoreUnavailable
from lightning_proxy.serving.swap import Swap
from lightning_proxy.trainer.lock import only_trainer
from lightning_proxy.trainer.types import Batch
from support.training import bench


async def test_a_step_reaches_the_trackers_once_also_when_killed_before_it_was_told(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        loop, told = b.loop(), []
        with monkeypatch.context() as killed:
            killed.setattr(b.trainer.trackers, "report", None)
            with pytest.raises(TypeError):
                await loop.run(asyncio.Event(), once=True)
        for _ in range(2):
            loop = b.loop()
            monkeypatch.setattr(b.trainer.trackers, "report", told.append)
            await loop.run(asyncio.Event(), once=True)
        assert [(metrics.get("version"), "verify_deviations" in metrics) for metrics in told] == [
            (1, False),
            (None, True),
        ]


@pytest.mark.parametrize("moment", ["claim", "trained", "set_live", "update_metrics"])
async def test_a_store_that_is_locked_for_long_is_waited_for(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.05)
    async with bench(base, tmp_path, busy_timeout_s=0.1) as b:
        rollouts = await b.groups("t1", "t2")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        part = b.store.versions if moment == "set_live" else b.store.steps
        unlocked = getattr(part, moment)

        async def locked(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(part, moment, unlocked)
            other.execute("BEGIN IMMEDIATE")
            return await unlocked(*args, **kwargs)

        monkeypatch.setattr(part, moment, locked)
        training = asyncio.create_task(b.loop().run(asyncio.Event(), once=True))
        while "cannot be written" not in caplog.text:
            assert not training.done()
            await asyncio.sleep(0.01)
        other.execute("COMMIT")
        await training
        other.close()
        last = await b.store.steps.last()
        assert last is not None and "publish_s" in last.metrics
        assert await b.steps_of(rollouts) == {last.step}
        live = await b.store.versions.live()
        assert (live.step, live.verified) == (last.step, True)


async def test_a_first_step_that_is_done_again_begins_with_the_weights_of_the_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
        loop, began, failures = b.loop(), [], [StoreUnavailable("the store cannot be read")]
        computed, newest = b.trainer.forward_backward, b.store.steps.newest

        def watched(batch: Batch) -> None:
            began.append((b.trainer.adapter(), len(b.trainer.optimizer.state)))
            computed(batch)

        async def fails_once(limit: int, **more: Any) -> Any:  # between the step and its commit
            if began and failures:
                raise failures.pop()
            return await newest(limit, **more)

        monkeypatch.setattr(b.trainer, "forward_backward", watched)
        monkeypatch.setattr(b.store.steps, "newest", fails_once)
        await loop.run(asyncio.Event(), once=True)
        (first, moments), (again, moments_again) = began
        assert (moments, moments_again) == (0, 0)
        assert all(torch.equal(first[name], again[name]) for name in first)


async def test_a_start_without_a_step_leaves_nothing_that_another_configuration_cannot_go_back_to(
    base: Path, tmp_path: Path
) -> None:
    async with bench(base, tmp_path, lora_rank=4) as b:
        await b.loop().resume()
        await b.groups("t1", "t2")
        await b.loop(lora_rank=8).run(asyncio.Event(), once=True)
        await Swap(b.store, b.vllm, "merged", b.config.policy.directory).activate(await b.store.versions.get(0))
        await b.groups("t3", "t4")
        await b.loop(lora_rank=8).run(asyncio.Event(), once=True)
        assert [(step.base, step.version) for step in await b.store.steps.all()] == [(0, 1), (0, 2)]


def test_two_trainers_share_neither_a_store_nor_a_directory(tmp_path: Path) -> None:
    with only_trainer(tmp_path / "a", tmp_path / "s.db"):
        (tmp_path / "link.db").symlink_to(tmp_path / "s.db")
        for directory, store, held in (("b", "link.db", "s.db"), ("a", "other.db", "a")):
            with (
                pytest.raises(ConfigError, match=f"another trainer works on {tmp_path / held}; stop it first"),
                only_trainer(tmp_path / directory, tmp_path / store),
            ):
                pass
    with only_trainer(tmp_path / "b", tmp_path / "s.db"):
        pass
