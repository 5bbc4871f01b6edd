"""What the memory for recent calls counts is what they take, and no more than its bound is kept."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from lightning_proxy.core.records import CallEnd, CallStart, Choice, RolloutName
from lightning_proxy.proxy.gateway.recent import RecentCalls
from lightning_proxy.proxy.gateway.recorder import _prepared

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
