"""What is kept of recent calls: within bounds, as counted, and without reading a rollout again for each call."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName
from lightning_proxy.proxy.gateway.exact import earlier_turn
from lightning_proxy.proxy.gateway.recent import History, RecentCalls
from lightning_proxy.proxy.gateway.recorder import Recorder, _prepared
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.store import Store

EACH, BOUND = 4, 4_000_000
Json = dict[str, Any]


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def tiny() -> Iterator[tuple[str, Json]]:
    for i in range(4000):
        yield f"r{i}", {"messages": [user(f"hello {i}")]}


def chains_with_tools() -> Iterator[tuple[str, Json]]:
    """Their tools are the same at every turn."""
    properties = {f"argument {n}": {"type": "string", "description": "a text"} for n in range(200)}
    for i in range(60):
        messages = [user(f"question {i}")]
        for turn in range(8):
            yield f"r{i}", {"tools": [{"function": {"name": "f", "parameters": properties}}], "messages": [*messages]}
            call = {"id": f"call_{i}_{turn}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{turn} " * 100})


def tokens() -> Iterator[tuple[str, Json]]:
    for i in range(30):
        yield f"r{i}", {"prompt": [*range(1000, 20_000)]}


@pytest.mark.parametrize("calls", [tiny, chains_with_tools, tokens])
def test_what_is_kept_is_what_is_counted(calls: Any) -> None:
    recent = RecentCalls(BOUND, EACH)
    tracemalloc.start()
    for n, (rollout_id, body) in enumerate(calls()):
        text = orjson.dumps(body)
        start = CallStart(f"c{n}", RolloutName(rollout_id), "chat/completions", "m", 0, orjson.loads(text), 1.0)
        recent.add(rollout_id, _prepared(start, recent.of(rollout_id))[2])
        recent.ended(CallEnd(f"c{n}", rollout_id, "ok", {}, 200, (1, 2, 3), (Choice(0, ()),)))
    del text, body, start
    there, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert BOUND / 2 < recent._calls.size <= BOUND
    assert there < 1.2 * recent._calls.size + 100_000
    assert there > 0.4 * recent._calls.size
    for i in range(4000):
        recent.forget(f"r{i}")
    assert recent._calls.size == 0


async def test_what_another_worker_answers_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout is read whole once; after that, the rows of the other worker's new calls, however long it is."""
    database = await open_database(StoreConfig(url=f"sqlite:///{tmp_path}/store.db"))
    name, messages, prompt = RolloutName("r", None, None), [user("hi")], (1,)
    async with Recorder(Store(database), merged=False) as mine, Recorder(Store(database), merged=False) as others:

        async def turn(recorder: Recorder, n: int) -> None:
            nonlocal messages, prompt
            said = {"role": "assistant", "content": f"answer {n}"}
            sampled = (Choice(0, (n + 2,), (-1.0,), "stop"),)
            request = {"model": "m", "messages": messages}
            await recorder.start(CallStart(f"c{n}", name, "chat/completions", "m", 0, request, 0.0))
            response = {"choices": [{"index": 0, "message": said}]}
            await recorder.end(CallEnd(f"c{n}", "r", "ok", response, 200, prompt, sampled))
            messages, prompt = [*messages, said, user("more")], (*prompt, n + 2, 1)

        for n in range(40):
            await turn((mine, others)[n % 2], n)
        recent, rows = History(Store(database), lambda call, known: call.request), list[int]()
        await earlier_turn(recent, "r", {"model": "m", "messages": messages})
        run = database.all

        async def counted(sql: str, params: Any = None) -> Any:
            found = await run(sql, params)
            rows.append(len(found))
            return found

        monkeypatch.setattr(database, "all", counted)
        for n in range(40, 46):
            await turn((mine, others)[n % 2], n)
            found = await earlier_turn(recent, "r", {"model": "m", "messages": messages})
            assert (found.ids.tolist(), found.messages) == ([*prompt[:-1]], messages[:-2])
        assert rows == [1] * 6
    await database.close()
