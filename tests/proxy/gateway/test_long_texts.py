"""No text of a request or an answer holds up the calls of others."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from lightning_proxy.proxy.apis.assemble import Assembler

PATH = "/v1/chat/completions"
Running = Callable[..., AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def nobody_held_up() -> AsyncIterator[None]:
    """Watch how long the event loop lets another task wait: seconds only where it does the work itself."""
    longest = 0.0

    async def wait() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)

    other = asyncio.create_task(wait())
    await asyncio.sleep(0)
    yield
    await asyncio.sleep(0.02)
    other.cancel()
    assert longest < 5


async def test_no_text_of_a_call_holds_others_up(running: Running, tmp_path: Path) -> None:
    fence = "```json" + " " * 3000 + "x"  # a pattern that went back and forth took minutes
    orders = {"a": [f"order number {i:06} is here" for i in range(8_000)]}

    def called(arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {
            "role": "assistant",
            "tool_calls": [{"id": "call_abcdefghij", "type": "function", "function": function}],
        }

    texts = {
        "answer": ("go", {"role": "assistant", "content": fence}),
        "call": ("go", called(fence)),
        "secrets": ("sk-" * 60_000, {"role": "assistant", "content": "sk-" * 200_000}),
        "many texts to a long request": ("word " * 120_000, called(json.dumps(orders))),
    }
    async with running(tmp_path, recording={"redact": {"secrets": True}}) as system:

        async def ask(body: dict[str, Any]) -> tuple[int, Any]:
            packed = gzip.compress(json.dumps(body).encode(), 1)
            answered: tuple[int, Any] = await system.call("POST", PATH, packed, Content_Encoding="gzip")
            return answered

        for name, (said, message) in texts.items():
            system.vllm.answer = lambda _, message=message: message
            messages = [{"role": "user", "content": f"{name} {said}"}]
            body = {"model": "policy", "messages": messages}
            async with nobody_held_up():
                status, answer = await ask(body)
                assert status == 200, name
            given = answer["choices"][0]["message"]
            assert all(given[field] == value for field, value in message.items()), name
            body["messages"] = [*messages, message, {"role": "user", "content": "and?"}]  # type: ignore[list-item]
            async with nobody_held_up():
                assert (await ask(body))[0] == 200, name
        _, listed = await system.call("GET", "/rollouts")
    assert len(listed["data"]) == len(texts), "each is one conversation"


def test_many_tool_calls_of_a_stream_take_time_in_proportion() -> None:
    def seconds(calls: int) -> float:
        assembler, began = Assembler(), time.thread_time()
        for i in range(calls):
            call = {"index": i, "id": f"call_{i}", "function": {"name": "f", "arguments": "{}"}}
            assembler.feed({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
        assert len((assembler.result() or {})["choices"][0]["message"]["tool_calls"]) == calls
        return time.thread_time() - began

    few = min(seconds(1_000) for _ in range(3))
    assert seconds(16_000) < 60 * few, "16 times as many took 256 times as long"
