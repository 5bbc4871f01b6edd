"""One trainer of all works on a store on a server. One that loses its lock stops, and goes on when it has it again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.store.opening import opened
from lightning_proxy.trainer import lock
from lightning_proxy.trainer.waiting import in_thread
from support.stores import END_LOCKS, Server, postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


async def test_a_trainer_that_loses_its_lock_waits_while_another_has_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(store=StoreConfig(url=server.new_database()))
    running, begun, again = 0, asyncio.Event(), asyncio.Semaphore(0)

    async def work() -> None:
        nonlocal running
        running += 1
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            running -= 1

    monkeypatch.setattr(lock, "pause", lambda stop: again.acquire())
    async with opened(config.store) as one, opened(config.store) as two:
        training = asyncio.create_task(lock.while_alone(config, one, asyncio.Event(), work))
        await begun.wait()
        with pytest.raises(ConfigError, match="another trainer works on"):
            await lock.while_alone(config, two, asyncio.Event(), work)
        begun.clear()
        await two.all(END_LOCKS)
        while running:
            await asyncio.sleep(0.01)
        async with two.lock("trainer") as other:
            assert other
            again.release()
            await asyncio.sleep(0.3)
            assert not running and not training.done()
        again.release()
        await begun.wait()
        assert running == 1
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)


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
