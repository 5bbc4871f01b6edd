"""What a killed or stopped trainer leaves behind, and that the next one goes on from there; one works at a time."""

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, StoreUnavailable
from lightning_proxy.trainer import lock
from lightning_proxy.trainer.waiting import in_thread
from support.training import Start


async def test_a_step_reaches_trackers_once_also_after_a_kill(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        await b.groups("t1", "t2")
        loop, told = b.loop(), []
        with monkeypatch.context() as killed:
            killed.setattr(b.trainer.trackers, "report", None)
            with pytest.raises(TypeError):
                await b.train(loop=loop)
        for _ in range(2):
            loop = b.loop()
            monkeypatch.setattr(b.trainer.trackers, "report", told.append)
            await b.train(loop=loop)
        found = [(metrics.get("version"), "verify_deviations" in metrics) for metrics in told]
        assert found == [(1, False), (None, True)]


@pytest.mark.parametrize("moment", ["claim", "trained", "set_live", "update_metrics"])
async def test_a_store_that_is_locked_for_long_is_waited_for(
    bench: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    async with bench(busy_timeout_s=0.1) as b:
        rollouts = await b.groups("t1", "t2")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        part = b.store.versions if moment == "set_live" else b.store.steps
        unlocked = getattr(part, moment)

        async def locked(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(part, moment, unlocked)
            other.execute("BEGIN IMMEDIATE")
            return await unlocked(*args, **kwargs)

        monkeypatch.setattr(part, moment, locked)
        training = asyncio.create_task(b.train())
        while "cannot be written" not in caplog.text:
            assert not training.done()
            await asyncio.sleep(0.01)
        other.execute("COMMIT")
        await training
        other.close()
        last = await b.last()
        assert "publish_s" in last.metrics
        assert await b.steps_of(rollouts) == {last.step}
        assert (await b.live())[1:] == (last.step, True)


async def test_a_first_step_done_again_begins_with_the_base(bench: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        loop, began = b.loop(), []
        step = b.trainer.optim_step

        def fails_once() -> dict[str, Any]:
            began.append((b.trainer.adapter(), len(b.trainer.optimizer.state)))
            metrics: dict[str, Any] = step()
            if len(began) == 1:  # between the step and its commit
                raise StoreUnavailable("the store cannot be read")
            return metrics

        monkeypatch.setattr(b.trainer, "optim_step", fails_once)
        await b.train("t1", "t2", loop=loop)
        (first, moments), (again, moments_again) = began
        assert (moments, moments_again) == (0, 0)
        assert all(torch.equal(first[name], again[name]) for name in first)


async def test_a_start_without_a_step_leaves_nothing_that_another_configuration_cannot_go_back_to(bench: Start) -> None:
    async with bench(lora_rank=4) as b:
        await b.loop().resume()
        await b.train("t1", "t2", lora_rank=8)
        await b.activate(0)
        await b.train("t3", "t4", lora_rank=8)
        assert [(step.base, step.version) for step in await b.store.steps.all()] == [(0, 1), (0, 2)]


def test_two_trainers_share_neither_a_store_nor_a_directory(tmp_path: Path) -> None:
    with lock.only_trainer(tmp_path / "a", tmp_path / "s.db"):
        (tmp_path / "link.db").symlink_to(tmp_path / "s.db")
        for directory, store, held in (("b", "link.db", "s.db"), ("a", "other.db", "a")):
            with (
                pytest.raises(ConfigError, match=f"another trainer is using {tmp_path / held}; stop it first"),
                lock.only_trainer(tmp_path / directory, tmp_path / store),
            ):
                pass
    with lock.only_trainer(tmp_path / "b", tmp_path / "s.db"):
        pass


async def test_a_trainer_that_loses_its_lock_waits_until_no_other_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    works = 0

    async def work() -> None:
        nonlocal works
        works += 1
        if works == 1:
            raise StoreUnavailable("the lock is lost")

    async def while_alone(*ours: bool) -> None:
        """At each try, whether the lock is ours."""
        locks = (nullcontext(one) for one in ours)
        database: Any = SimpleNamespace(lock=lambda name: next(locks))
        await lock.while_alone(Config(), database, asyncio.Event(), work)
        assert next(locks, None) is None

    monkeypatch.setattr(lock, "pause", AsyncMock())
    await while_alone(True, False, True)
    assert works == 2
    works = 1
    await while_alone(False, False, True, True)  # a killed trainer's lock is released a moment later
    assert works == 2
    monkeypatch.setattr(lock, "RELEASED_S", 0)
    with pytest.raises(ConfigError, match="another trainer is using"):
        await while_alone(False, False)
    assert works == 2


async def test_what_runs_in_a_thread_has_ended_when_a_cancellation_goes_on() -> None:
    begun, go, ended = threading.Event(), threading.Event(), False

    def slow() -> None:
        nonlocal ended
        begun.set()
        go.wait(10)
        ended = True

    leaving = asyncio.create_task(in_thread(slow))
    await asyncio.to_thread(begun.wait, 10)
    leaving.cancel()
    await asyncio.sleep(0.05)
    assert not leaving.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert ended


async def test_work_in_a_thread_that_raises_stop_iteration_ends() -> None:
    empty: Iterator[int] = iter(())
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_thread(next, empty)
