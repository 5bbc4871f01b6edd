"""Records in a store: each fails alone, and what is kept of recent calls is bounded and reads no rollout again."""

from __future__ import annotations

import asyncio
import sqlite3
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import StoreUnavailable
from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName
from lightning_proxy.proxy.gateway import recorder as recording
from lightning_proxy.proxy.gateway.exact import earlier_turn
from lightning_proxy.proxy.gateway.recent import History, RecentCalls
from lightning_proxy.proxy.gateway.recorder import Recorder, _prepared
from lightning_proxy.proxy.gateway.unnamed import Conversation, UnnamedRollouts, start_statements
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url

BOUND = 4_000_000
PROMPT = {"prompt": [*range(1000, 20_000)]}
Json = dict[str, Any]


def user(content: str) -> Json:
    return {"role": "user", "content": content}


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as running:
        yield running


@pytest.fixture
async def recorder(database: Database) -> AsyncIterator[Recorder]:
    async with Recorder(Store(database), merged=False) as running:
        yield running


def start(call_id: str, messages: Sequence[Json], rollout_id: str = "r", **more: Any) -> CallStart:
    request = {"messages": messages}
    return CallStart(call_id, RolloutName(rollout_id), "chat/completions", "m", 0, request, 1.0)._replace(**more)


async def test_a_record_that_cannot_be_stored_fails_alone(database: Database, recorder: Recorder) -> None:
    await recorder.start(start("twice", []))
    names = ["a", "twice", "b"]
    results = await asyncio.gather(*(recorder.start(start(name, [])) for name in names), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), StoreUnavailable, type(None)]
    assert {c.call_id for c in await Store(database).calls.of("r")} == {"twice", "a", "b"}


async def test_a_retry_that_was_killed_before_its_record_is_found_again(database: Database, recorder: Recorder) -> None:
    unnamed, first = UnnamedRollouts(Store(database)), start("c", [user("hi")])
    conversation = Conversation("key", first.rollout, first.request)
    await recorder.start(first, start_statements(first, conversation))
    await recorder.end(CallEnd("c", "r", "ok", {}, 200))
    for _ in range(2):
        assert await unnamed.find(conversation, is_retry=True) == "r"
    retry = first._replace(call_id="d", is_retry=True)
    await recorder.start(retry, start_statements(retry, conversation))
    tips = await database.all("SELECT call_id FROM conversation_tips")
    assert [row["call_id"] for row in tips] == ["d"], "recorded, it takes the place of what it repeats"


# What is kept of recent calls


def chats(tools: Json) -> Iterator[tuple[str, Json]]:
    """Conversations whose tools are the same at every turn, and short questions."""
    for i in range(60):
        messages = [user(f"question {i}")]
        for turn in range(8):
            yield f"r{i}", {"tools": [tools], "messages": [*messages]}
            messages += [{"role": "assistant", "content": None}, user(f"{turn} " * 100)]
    for i in range(60, 4000):
        yield f"r{i}", {"messages": [user(f"hello {i}")]}


@pytest.mark.parametrize("large", [True, False])
def test_what_is_kept_is_what_is_counted(large: bool) -> None:
    """Token ids in prompts, or texts and tools."""
    recent, properties = RecentCalls(BOUND, 4), {f"argument {n}": {"type": "string"} for n in range(400)}
    calls = chats({"function": {"name": "f", "parameters": properties}})
    tracemalloc.start()
    for n, (rollout_id, body) in enumerate(((f"r{i}", PROMPT) for i in range(30)) if large else calls):
        text = orjson.dumps(body)
        begun = start(f"c{n}", [], rollout_id, request=orjson.loads(text))
        recent.add(rollout_id, _prepared(begun, recent.of(rollout_id))[2])
        recent.ended(CallEnd(f"c{n}", rollout_id, "ok", {}, 200, (1, 2, 3), (Choice(0, ()),)))
    del text, body, begun
    there, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert BOUND / 2 < recent._calls.size <= BOUND
    assert 0.4 * recent._calls.size < there < 1.2 * recent._calls.size + 100_000
    for i in range(4000):
        recent.forget(f"r{i}")
    assert recent._calls.size == 0


async def test_of_what_another_worker_answers_each_new_call_is_read_once(
    database: Database, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, prompt = [user("hi")], (1,)
    async with Recorder(Store(database), merged=False) as others:

        async def turn(n: int) -> None:
            nonlocal messages, prompt
            by, said = (recorder, others)[n % 2], {"role": "assistant", "content": f"answer {n}"}
            await by.start(start(f"c{n}", messages))
            response = {"choices": [{"index": 0, "message": said}]}
            await by.end(CallEnd(f"c{n}", "r", "ok", response, 200, prompt, (Choice(0, (n + 2,), (-1.0,), "stop"),)))
            messages, prompt = [*messages, said, user("more")], (*prompt, n + 2, 1)

        for n in range(40):
            await turn(n)
        recent = History(Store(database), lambda call, known: call.request)
        await earlier_turn(recent, "r", {"messages": messages})
        run, rows = database.all, list[int]()

        async def counted(sql: str, params: Any = None) -> Any:
            found = await run(sql, params)
            rows.append(len(found))
            return found

        monkeypatch.setattr(database, "all", counted)
        for n in range(40, 46):
            await turn(n)
            found = await earlier_turn(recent, "r", {"messages": messages})
            assert (found.ids.tolist(), found.messages) == ([*prompt[:-1]], messages[:-2])
        assert rows == [1] * 6


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
            settle, told = recording._resolve, []
            patched.setattr(recording, "_resolve", lambda *a: settle(*a) if told else (told.append(1), broken()))
            async with asyncio.timeout(20):
                answers = await asyncio.gather(*(system.chat(f"r{n}") for n in range(3)))
        assert {status for status, _ in [*answers, await system.chat("after")]} == {503}
        status, view = await system.call("GET", "/readyz")
        assert status == 503 and "records are no longer written: a fault of the writer's own" in view["store"]
    assert "start the proxy again" in caplog.text
