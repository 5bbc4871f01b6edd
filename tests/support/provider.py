"""A provider that answers sums well, in OpenAI's and Anthropic's APIs: `serving_provider()` yields its root URL."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

WORDY = 10  # every sum of this worth is answered in a sentence, which is worth less


def reply(request: dict[str, Any]) -> str:
    found = re.search(r"(\d+)\+(\d+)", str(request["messages"][-1]["content"]))
    assert found is not None
    total = int(found[1]) + int(found[2])
    return f"The answer is {total}." if total == WORDY else str(total)


async def chat(request: web.Request) -> web.Response:
    asked = await request.json()
    if request.headers["Authorization"] != "Bearer YOUR-OPENAI-KEY":
        return web.json_response({"error": {"message": "wrong key"}}, status=401)
    choice = {"index": 0, "message": {"role": "assistant", "content": reply(asked)}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": asked["model"], "usage": usage}
    return web.json_response(body | {"choices": [choice]})


async def messages(request: web.Request) -> web.Response:
    asked = await request.json()
    if request.headers["x-api-key"] != "YOUR-ANTHROPIC-KEY":
        return web.json_response({"type": "error", "error": {"type": "authentication_error"}}, status=401)
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"], "stop_reason": "end_turn"}
    body |= {"content": [{"type": "text", "text": reply(asked)}], "stop_sequence": None}
    return web.json_response(body | {"usage": {"input_tokens": 20, "output_tokens": 1}})


async def models(_: web.Request) -> web.Response:
    names = ("gpt-4.1-mini", "claude-haiku-4-5")
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


@asynccontextmanager
async def serving_provider() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/messages", messages)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
