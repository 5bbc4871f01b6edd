"""Records in a real SQLite file: stored once, read back exactly, committed together, failing alone."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import StoreUnavailable
from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName
from lightning_proxy.proxy.gateway import recorder as recording
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as running:
        yield running


@pytest.fixture
async def recorder(database: Database) -> AsyncIterator[Recorder]:
    async with Recorder(Store(database), merged=False) as running:
        yield running


def start(call_id: str, request: dict[str, Any], rollout_id: str = "r", agent: str | None = None) -> CallStart:
    return CallStart(call_id, RolloutName(rollout_id, "t", agent), "chat/completions", "m", 0, request, 1.0)


def end(call_id: str, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), **more: Any) -> CallEnd:
    choice = Choice(0, answer, tuple(-0.5 for _ in answer), "stop")
    return CallEnd(call_id, more.pop("rollout_id", "r"), "ok", {"id": call_id}, 200, prompt, (choice,), **more)


async def test_a_large_request_is_deleted_with_its_rollout(database: Database, recorder: Recorder) -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": "ä" * 100_000}]}
    await recorder.start(start("c", request))
    await recorder.end(end("c", (1, 2)))
    (call,) = await Store(database).calls.of("r")
    assert call.request == request
    await Store(database).rollouts.end("r", "completed", None)
    await Store(database).rollouts.delete("r")
    for table in ("calls", "large_requests"):
        assert await database.all(f"SELECT * FROM {table}") == []


async def test_a_record_that_cannot_be_stored_fails_alone(database: Database, recorder: Recorder) -> None:
    await recorder.start(start("twice", {"messages": []}))
    names = ["a", "twice", "b"]
    results = await asyncio.gather(
        *(recorder.start(start(name, {"messages": []})) for name in names), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), StoreUnavailable, type(None)]
    assert {c.call_id for c in await Store(database).calls.of("r")} == {"twice", "a", "b"}


async def test_a_retry_reads_what_it_may_repeat_alone(
    database: Database, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = 40
    messages = [{"role": "user", "content": f"{n}" * 200} for n in range(earlier)]
    for n in range(earlier):
        await recorder.start(start(f"c{n}", {"messages": messages[: n + 1]}))
        await recorder.end(end(f"c{n}")._replace(status="ok" if n + 1 < earlier else "error"))
    run, rows = database.all, list[list[str]]()

    async def counted(sql: str, params: Any = None) -> Any:
        found = await run(sql, params)
        rows.append([row["call_id"] for row in found])
        return found

    monkeypatch.setattr(database, "all", counted)
    await recorder.start(start("retry", {"messages": messages})._replace(is_retry=True))
    assert rows == [[f"c{earlier - 1}"]] * 2
    monkeypatch.undo()
    assert (await Store(database).calls.of("r"))[-2].superseded_by == "retry"


@pytest.mark.sqlite
async def test_a_store_is_opened_while_another_writes_to_it(database: Database) -> None:
    with closing(sqlite3.connect(database.where, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with opened(StoreConfig(url=f"sqlite:///{database.where}", busy_timeout_s=0.1)) as second:
            assert len(await second.all("SELECT * FROM policy_log")) == 1


async def test_where_the_writing_task_failed_calls_are_refused_and_the_proxy_is_not_ready(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of the writer's own")

    async with running(tmp_path) as system:
        assert (await system.chat("before"))[0] == 200
        with monkeypatch.context() as patched:
            settle, told = recording._settle, []
            patched.setattr(recording, "_settle", lambda *a: settle(*a) if told else (told.append(1), broken()))
            async with asyncio.timeout(20):
                answers = await asyncio.gather(*(system.chat(f"r{n}") for n in range(3)))
        assert {status for status, _ in [*answers, await system.chat("after")]} == {503}
        status, view = await system.call("GET", "/readyz")
        assert status == 503 and "records are not written any more: a fault of the writer's own" in view["store"]
    assert "start the proxy again" in caplog.text
