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
from lightning_proxy.core.errors import NotFound, StoreUnavailable
from lightning_proxy.core.json_text import loads
from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName, ToolCall
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import open_database, opened
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


@pytest.mark.parametrize("length", [10, 4_000, 100_000])
async def test_a_request_of_any_size_is_read_back_and_deleted_with_its_rollout(
    database: Database, recorder: Recorder, length: int
) -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": "ä" * length}]}
    await recorder.start(start("c", request))
    await recorder.end(end("c", (1, 2)))
    (call,) = await Store(database).calls.of("r")
    assert call.request == request
    await Store(database).rollouts.end("r", "completed", None)
    await Store(database).rollouts.delete("r")
    for table in ("calls", "large_requests"):
        assert await database.all(f"SELECT * FROM {table}") == []


async def test_a_request_as_deep_as_it_may_be_is_read_back(database: Database, recorder: Recorder) -> None:
    text = '{"messages":' + "[" * 1023 + "]" * 1023 + "}"
    await recorder.start(start("c", loads(text))._replace(request_text=text.encode()))
    (call,) = await Store(database).calls.of("r")
    depth, inner = 0, call.request["messages"]
    while inner:
        depth, inner = depth + 1, inner[0]
    assert depth == 1022


async def test_a_call_that_never_became_a_record_is_not_counted(database: Database, recorder: Recorder) -> None:
    await recorder.start(start("c", {"messages": []}))
    await recorder.end(end("c", (1,), (2,)))
    await recorder.end(end("unknown", (1,), (2,)))
    assert (await Store(database).rollouts.get("r")).calls == 1


async def test_many_calls_at_once_are_all_there(database: Database, recorder: Recorder) -> None:
    async def call(i: int) -> None:
        await recorder.start(start(f"c{i}", {"messages": []}, f"r{i % 7}"))
        await recorder.end(end(f"c{i}", (1,), (2,), rollout_id=f"r{i % 7}"))

    await asyncio.gather(*(call(i) for i in range(200)))
    for r in range(7):
        calls = await Store(database).calls.of(f"r{r}")
        assert [c.seq for c in calls] == list(range(len(calls)))
        assert {c.call_id for c in calls} == {f"c{i}" for i in range(200) if i % 7 == r}


async def test_a_record_that_cannot_be_stored_fails_alone(database: Database, recorder: Recorder) -> None:
    await recorder.start(start("twice", {"messages": []}))
    names = ["a", "twice", "b"]
    results = await asyncio.gather(
        *(recorder.start(start(name, {"messages": []})) for name in names), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), StoreUnavailable, type(None)]
    assert {c.call_id for c in await Store(database).calls.of("r")} == {"twice", "a", "b"}


async def test_names_and_ids_that_utf8_cannot_hold_do_not_keep_a_call_from_its_record(
    database: Database, recorder: Recorder
) -> None:
    odd = "a\ud800"
    await recorder.start(start("c0", {"messages": []})._replace(model=odd))
    await recorder.end(end("c0", tool_calls=(ToolCall(odd, odd, f'{{"a": "{odd}"}}'),), error=odd))
    told = {"messages": [{"role": "tool", "tool_call_id": odd, "content": odd}]}
    await asyncio.gather(recorder.start(start("c1", told)), recorder.start(start("c2", {}, "other")))
    (first, second) = await Store(database).calls.of("r")
    assert (first.model, first.error, first.tool_calls[0].id, first.tool_calls[0].result) == ("a?", "a?", "a?", odd)
    assert second.request == told


@pytest.mark.parametrize("earlier", [4, 40])
async def test_a_retry_reads_what_it_may_repeat_alone(
    database: Database, recorder: Recorder, earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
async def test_a_file_that_is_no_database_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        await open_database(StoreConfig(url=store_url(tmp_path)))
    assert not [file for file in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(file.resolve())]


async def test_an_unknown_rollout_is_not_found(database: Database) -> None:
    with pytest.raises(NotFound):
        await Store(database).calls.of("nobody")


async def test_two_processes_may_open_a_new_store_at_once(tmp_path: Path) -> None:
    config = StoreConfig(url=f"sqlite:///{tmp_path}/new.db")
    opened = await asyncio.gather(*(open_database(config) for _ in range(4)))
    assert len({row["n"] for db in opened for row in await db.all("SELECT COUNT(*) AS n FROM policy_log")}) == 1
    for database in opened:
        await database.close()


@pytest.mark.sqlite
async def test_a_store_is_opened_while_another_writes_to_it(database: Database) -> None:
    with closing(sqlite3.connect(database.where, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with opened(StoreConfig(url=f"sqlite:///{database.where}", busy_timeout_s=0.1)) as second:
            assert len(await second.all("SELECT * FROM policy_log")) == 1
