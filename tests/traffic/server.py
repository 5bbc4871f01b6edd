"""Recorded traffic, and a played model over HTTP, which answers whole and as the events of a stream.

Of the recording, what reached the proxy and what it answered, in the order of starts and ends, a line of JSON each.
The first: `versions` of the frameworks. Then, for each call n, `start` with path, key, truth (the rollout that the
agent named in a header), retry (of the client) and body; and `end` with status and answer, a streamed one as the whole
object that its events make up. No answer: the client left.
"""

from __future__ import annotations

import asyncio
import json
import lzma
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from contract.system import listening as serving  # noqa: F401
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from support.sections import PolicyConfig

Json = dict[str, Any]
# Status and body for a request; None: no answer ever.
Answer = Callable[[web.Request, Json], Awaitable[tuple[int, Json] | None]]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PIECE = 20  # characters


@dataclass
class Call:
    path: str
    truth: str
    retry: int
    body: Json
    status: int | None = None
    answer: Any = None


@dataclass
class Traffic:
    """`moments`: (call, whether it ended) in order."""

    calls: list[Call]
    moments: list[tuple[int, bool]]


def read() -> Traffic:
    packed = (Path(__file__).parent / "traffic.jsonl.xz").read_bytes()
    _, *lines = map(orjson.loads, lzma.decompress(packed).splitlines())
    traffic = Traffic([], [])
    for line in lines:
        if "start" in line:
            traffic.calls.append(Call(line["path"], line["truth"], line["retry"], line["body"]))
            traffic.moments.append((line["start"], False))
        else:
            call = traffic.calls[line["end"]]
            call.status, call.answer = line["status"], line["answer"]
            traffic.moments.append((line["end"], True))
    return traffic


def chat_events(whole: Json, request: Json) -> Iterator[Json]:
    top = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in whole["choices"]:
        i = choice["index"]
        first = {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        prompt = {"prompt_token_ids": whole["prompt_token_ids"]} if "prompt_token_ids" in whole else {}
        yield top | {"choices": [first]} | prompt
        for delta in _deltas(choice["message"]):
            yield top | {"choices": [{"index": i, "delta": delta, "finish_reason": None}]}
        last = {name: choice[name] for name in ("token_ids", "logprobs", "finish_reason") if name in choice}
        yield top | {"choices": [{"index": i, "delta": {}} | last]}
    if (request.get("stream_options") or {}).get("include_usage"):
        yield top | {"choices": [], "usage": whole["usage"]}


def _deltas(message: Json) -> Iterator[Json]:
    for piece in _pieces(message["content"] or ""):
        yield {"content": piece}
    for i, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield {"tool_calls": [call | {"index": i, "function": {"name": function["name"], "arguments": ""}}]}
        for piece in _pieces(function["arguments"]):
            yield {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}


def _pieces(text: str, size: int = PIECE) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def responses_events(whole: Json) -> Iterator[Json]:
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for i, item in enumerate(whole["output"]):
        at = {"output_index": i, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""} if "arguments" in item else {}
        begun = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": i, "item": begun}
        if item["type"] == "message":
            part, at = item["content"][0], at | {"content_index": 0}
            logprobs = part.get("logprobs") or []
            yield at | {"type": "response.content_part.added", "part": part | {"text": "", "logprobs": []}}
            for piece in _pieces(part["text"]):
                yield at | {"type": "response.output_text.delta", "delta": piece, "logprobs": logprobs[:1]}
            yield at | {"type": "response.output_text.done", "text": part["text"], "logprobs": logprobs}
            yield at | {"type": "response.content_part.done", "part": part}
        elif item["type"] == "function_call":
            for piece in _pieces(item["arguments"]):
                yield at | {"type": "response.function_call_arguments.delta", "delta": piece}
            done = {"type": "response.function_call_arguments.done", "arguments": item["arguments"]}
            yield at | done | {"name": item["name"]}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": "response.completed", "response": whole}


def messages_events(whole: Json, size: int = PIECE) -> Iterator[Json]:
    yield {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}
    for i, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = {"text": ""} if is_text else {"input": {}}
        yield {"type": "content_block_start", "index": i, "content_block": block | empty}
        kind, name = ("text_delta", "text") if is_text else ("input_json_delta", "partial_json")
        for piece in _pieces(block["text"] if is_text else json.dumps(block["input"]), size):
            yield {"type": "content_block_delta", "index": i, "delta": {"type": kind, name: piece}}
        yield {"type": "content_block_stop", "index": i}
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def stream(path: str, whole: Json, request: Json) -> Iterator[bytes]:
    """The answer as server-sent events."""
    if path == CHAT:
        yield from (b"data: " + json.dumps(event).encode() + b"\n\n" for event in chat_events(whole, request))
        yield b"data: [DONE]\n\n"
        return
    numbered = (event | {"sequence_number": n} for n, event in enumerate(responses_events(whole)))
    for event in numbered if path == RESPONSES else messages_events(whole):
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def app(answer: Answer) -> web.Application:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answered = await answer(request, body)
        if answered is None:
            await asyncio.sleep(60)
            return web.Response(status=504)
        status, whole = answered
        if status != 200 or not body.get("stream"):
            return web.json_response(whole, status=status)
        text = b"".join(stream(request.path, whole, body))
        return web.Response(body=text, content_type="text/event-stream")

    async def operate(request: web.Request) -> web.Response:
        entry = {"id": "base", "object": "model", "parent": None, "root": "/", "max_model_len": 8192}
        return web.json_response({"weight_version": "default", "is_paused": False, "data": [entry]})

    application = web.Application(client_max_size=64 * 2**20)
    for path in (CHAT, RESPONSES, MESSAGES):
        application.router.add_post(path, handle)
    application.router.add_get("/{path:v1/models|weight_info|is_paused}", operate)
    return application


def config_of(upstream: str, directory: Path) -> Config:
    """Of a proxy in front of an upstream, its store in a directory."""
    return Config(
        store=StoreConfig(url=f"sqlite:///{directory}/store.db"),
        upstreams=[UpstreamConfig(name="policy", base_url=f"{upstream}/v1")],
        policy=PolicyConfig(publish="merged", directory=directory / "policy"),
    )
