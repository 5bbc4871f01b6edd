"""Numbers of any size and length come back from the record as they were sent."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from support.in_process import proxy_of

NUMBERS = (
    "[1,1.0,-0.0,0.1234567890123456789,123456789012345678901234567890,-9223372036854775809,1e400,1e-400,"
    f"3.14159265358979323846,9007199254740993.0,{'7' * 4999}]"
)
SAID = '"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]'
CALLED = '{"type":"tool_use","id":"t","name":"f","input":{"n":NNN}}'
TOP = '"type":"message","role":"assistant","model":"m","stop_reason":"tool_use","usage":{"input_tokens":1,"x":NNN}'
ANSWERS = {
    "chat/completions": '{"id":"c","x":NNN,"usage":{"prompt_tokens":1,"cost":NNN},SAID}',
    "messages": '{"id":"m","content":[' + CALLED + "]," + TOP + "}",
}
STREAMS = {
    "chat/completions": [
        '{"id":"c","choices":[{"index":0,"delta":{"content":"x","n":NNN}}]}',
        '{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"cost":NNN}}',
        "[DONE]",
    ],
    "messages": [
        '{"type":"message_start","message":{"id":"m","content":[],' + TOP + "}}",
        '{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}',
        json.dumps({"type": "content_block_delta", "index": 0,
                    "delta": {"type": "input_json_delta", "partial_json": '{"n":NNN}'}}),
        '{"type":"message_stop"}',
    ],
}  # fmt: skip


def filled(text: str) -> str:
    """The text with the numbers in their places."""
    return text.replace("NNN", NUMBERS).replace("SAID", SAID)


def exactly(text: str | bytes) -> Any:
    """The value with every number as it is written."""
    return json.loads(text, parse_int=lambda digits: ("whole", digits), parse_float=lambda d: ("fraction", Decimal(d)))


THERE = exactly(NUMBERS)


async def _answer(request: web.Request) -> web.Response:
    path = request.match_info["path"]
    if b'"stream":true' in await request.read():
        text = "".join(f"data: {event}\n\n" for event in STREAMS[path])
        return web.Response(text=filled(text), content_type="text/event-stream")
    return web.Response(text=filled(ANSWERS[path]), content_type="application/json")


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "base", "parent": None, "root": "/base"}]})


@pytest.mark.parametrize("kind", ["openai", "vllm"])
async def test_numbers_in_requests_answers_and_metadata_come_back(tmp_path: Path, kind: Any) -> None:
    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/{path:.+}", _answer)
    async with TestServer(app) as upstream:
        config = Config(
            store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
            upstreams=[UpstreamConfig(name="up", kind=kind, base_url=str(upstream.make_url("/v1")))],
        )
        async with proxy_of(config) as url, aiohttp.ClientSession(url) as session:
            await _check(session)


async def _check(session: aiohttp.ClientSession) -> None:
    opened = exactly(await _post(session, "/rollouts", '{"metadata":{"n":NNN}}'))
    root = "/rollouts/" + opened[0]["rollout_id"]
    event = '{"kind":"action","name":"a","arguments":NNN,"result":NNN}'
    await _post(session, root + "/events", event)
    asked = []
    for path in ANSWERS:
        for stream in ("false", "true"):
            messages = ",".join(f'{{"role":"user","content":"{n}","n":NNN}}' for n in range(len(asked) + 1))
            body = f'{{"model":"m","stream":{stream},"messages":[{messages}],"x":{{"n":NNN}}}}'
            got = await _post(session, f"{root}/v1/{path}", body)
            if stream == "false":
                assert exactly(got) == exactly(filled(ANSWERS[path]))
            asked.append(exactly(filled(body)))
    async with session.get(root, params={"requests": "whole"}) as answer:
        rollout = exactly(await answer.read())
    async with session.get(root + "/transitions") as answer:
        assert (await answer.read()).count(b'"n":' + NUMBERS.encode()) > 4
    assert rollout["metadata"] == {"n": THERE}
    assert [rollout["events"][0][name] for name in ("arguments", "result")] == [THERE, THERE]
    chat, chat_streamed, messages_, messages_streamed = rollout["calls"]
    assert [call["request"] for call in rollout["calls"]] == asked
    assert [call["response"]["usage"].get("cost") for call in (chat, chat_streamed)] == [THERE, THERE]
    assert [chat["usage"]["cost"], chat["response"]["x"]] == [THERE, THERE]
    assert chat_streamed["response"]["choices"][0]["message"]["n"] == THERE
    for call in (messages_, messages_streamed):
        assert call["usage"]["x"] == THERE
        assert call["response"]["content"][0]["input"] == {"n": THERE}
        assert exactly(call["tool_calls"][0]["arguments"]) == {"n": THERE}

    reward = json.dumps({"rollout_id": opened[0]["rollout_id"]})[:-1] + ', "reward": 0.1234567890123456789}'
    await _post(session, "/reward", reward)
    async with session.get(root) as answer:
        assert float(exactly(await answer.read())["reward"][1]) == 0.1234567890123456789


async def _post(session: aiohttp.ClientSession, path: str, body: str) -> bytes:
    async with session.post(path, data=filled(body), headers={"Content-Type": "application/json"}) as answer:
        got = await answer.read()
        assert answer.status == 200, got
        return got
