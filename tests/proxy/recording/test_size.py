"""An agent re-sends its whole history at every turn; the file holds it once. Bytes in the file, for each dialect."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.apis.tools import tool_calls
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.json_text import dumps
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.retention import read_pages
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, RolloutName

TURNS = 50
SOURCE = random.Random(0)


def words(count: int) -> str:
    return " ".join(f"{SOURCE.getrandbits(24):06x}" for _ in range(count))


class Chat:
    endpoint, history = "chat/completions", "messages"

    def begin(self, system: str, question: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}

    def answer(self, name: str, text: str, arguments: str) -> tuple[dict[str, Any], list[Any]]:
        call = {"id": name, "type": "function", "function": {"name": "search", "arguments": arguments}}
        message = {"role": "assistant", "content": text, "tool_calls": [call]}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}, [message]

    def result(self, name: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": name, "content": text}


class Responses:
    endpoint, history = "responses", "input"

    def begin(self, system: str, question: str) -> dict[str, Any]:
        return {"instructions": system, "input": [{"role": "user", "content": question}]}

    def answer(self, name: str, text: str, arguments: str) -> tuple[dict[str, Any], list[Any]]:
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        call = {"type": "function_call", "call_id": name, "name": "search", "arguments": arguments}
        return {"object": "response", "output": [said, call]}, [said, call]

    def result(self, name: str, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": text}


class Messages:
    endpoint, history = "messages", "messages"

    def begin(self, system: str, question: str) -> dict[str, Any]:
        return {"system": system, "messages": [{"role": "user", "content": question}]}

    def answer(self, name: str, text: str, arguments: str) -> tuple[dict[str, Any], list[Any]]:
        call = {"type": "tool_use", "id": name, "name": "search", "input": {"query": arguments}}
        content = [{"type": "text", "text": text}, call]
        return {"type": "message", "role": "assistant", "content": content}, [{"role": "assistant", "content": content}]

    def result(self, name: str, text: str) -> dict[str, Any]:
        content = [{"type": "tool_result", "tool_use_id": name, "content": text}]
        return {"role": "user", "content": content}


@pytest.mark.parametrize("dialect", [Chat(), Responses(), Messages()], ids=lambda d: d.endpoint)
async def test_fifty_turns_take_about_twice_what_is_new_in_them(tmp_path: Path, dialect: Any) -> None:
    """New are every text, once, and each token's id and log-probability, as 32 bits each. Pages are not full."""
    config = StoreConfig(url=f"sqlite:///{tmp_path}/store.db")
    async with opened(config) as database, Recorder(Store(database), merged=False) as recorder:
        before = (await read_pages(database)).used
        system, question, tools = words(200), words(50), [{"name": "search", "description": words(100)}]
        request = dialect.begin(system, question) | {"model": "m", "tools": tools}
        unique = len(system) + len(question) + len(dumps(tools))
        prompt = tuple(range(700))
        sent = 0
        for turn in range(TURNS):
            sent += len(dumps(request)) + 4 * len(prompt)
            await recorder.start(CallStart(f"c{turn}", RolloutName("r"), dialect.endpoint, "m", 0, request, 1.0 + turn))
            said, arguments, told = words(40), dumps({"query": words(10)}), words(120)
            response, back = dialect.answer(f"call_{turn:032x}", said, arguments)
            sampled = tuple(range(120))
            choice = Choice(0, sampled, tuple(-0.5 for _ in sampled), "tool_calls")
            await recorder.end(
                CallEnd(f"c{turn}", "r", "ok", response, 200, prompt, (choice,), tool_calls=tool_calls(response))
            )
            unique += len(said) + len(arguments) + len(told) + 3 * 4 * 120
            request = request | {
                dialect.history: [*request[dialect.history], *back, dialect.result(f"call_{turn:032x}", told)]
            }
            prompt = prompt + sampled + tuple(range(turn, turn + 120))
        stored = (await read_pages(database)).used - before
        calls = await Store(database).calls.of("r")
    assert calls[-1].request[dialect.history] == request[dialect.history][: len(calls[-1].request[dialect.history])]
    assert [len(call.tool_calls) for call in calls] == [1] * TURNS
    assert calls[-2].tool_calls[0].result is not None
    print(f"{dialect.endpoint}: sent {sent:,} bytes, new {unique:,}, stored {stored:,} ({stored / unique:.2f})")
    assert stored <= 2.1 * unique
