"""A played model over HTTP: what it says in the shapes of the three APIs, whole and as the events of a stream."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from contract.system import listening as serving  # noqa: F401
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from support.sections import PolicyConfig

Json = dict[str, Any]
# Status and body for a request; None: no answer ever.
Answer = Callable[[web.Request, Json], Awaitable[tuple[int, Json] | None]]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass
class Said:
    """One answer: text, or calls of tools as (name, arguments), or both."""

    text: str | None = None
    calls: list[tuple[str, Json]] = field(default_factory=list)
    thought: str | None = None


@dataclass(frozen=True)
class Tool:
    name: str
    schema: Json


def items(request: Json) -> list[Any]:
    found = request.get("messages", request.get("input"))
    return found if isinstance(found, list) else [found]


def tools_of(request: Json) -> Iterator[Tool]:
    for tool in request.get("tools") or ():
        function = tool.get("function", tool)
        if function.get("name"):
            yield Tool(function["name"], function.get("parameters") or function.get("input_schema") or {})


class Ids:
    """Random ids, of a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def __call__(self, prefix: str) -> str:
        return f"{prefix}_{self._random.getrandbits(96):024x}"


def chat(request: Json, said: list[Said], new_id: Ids) -> Json:
    choices = [_choice(i, one, new_id, request) for i, one in enumerate(said)]
    spent = sum(len(_tokens(one)) for one in said)
    usage = {"prompt_tokens": 3, "completion_tokens": spent, "total_tokens": 3 + spent}
    body = {"id": new_id("chatcmpl"), "object": "chat.completion", "created": 1, "model": request.get("model")}
    more = {"prompt_token_ids": [1, 2, 3]} if request.get("return_token_ids") else {}
    return body | {"choices": choices, "usage": usage} | more


def _choice(index: int, said: Said, new_id: Ids, request: Json) -> Json:
    message: Json = {"role": "assistant", "content": said.text}
    if said.calls:
        message["tool_calls"] = [
            {"id": new_id("call"), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in said.calls
        ]
    reason = "tool_calls" if said.calls else "stop"
    choice: Json = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
    if request.get("return_token_ids"):
        choice["token_ids"] = list(range(len(_tokens(said))))
    if request.get("logprobs"):
        entries = [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in _tokens(said)]
        choice["logprobs"] = {"content": entries}
    return choice


def _tokens(said: Said) -> list[str]:
    return f"{said.text or ''} {json.dumps(said.calls) if said.calls else ''}".split()


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


def _pieces(text: str) -> list[str]:
    return [text[i : i + 20] for i in range(0, len(text), 20)]


def responses(request: Json, said: list[Said], new_id: Ids) -> Json:
    one, output = said[0], []
    if request.get("reasoning"):
        output.append({"type": "reasoning", "id": new_id("rs"), "summary": []})
    if one.text is not None:
        part = {"type": "output_text", "text": one.text, "annotations": [], "logprobs": []}
        content = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
        output.append(content | {"id": new_id("msg")})
    for name, arguments in one.calls:
        call = {"type": "function_call", "name": name, "arguments": json.dumps(arguments), "status": "completed"}
        output.append(call | {"id": new_id("fc"), "call_id": new_id("call")})
    spent = len(_tokens(one))
    usage = {
        "input_tokens": 3, "output_tokens": spent, "total_tokens": 3 + spent,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    return {
        "id": new_id("resp"), "object": "response", "created_at": 1, "status": "completed", "error": None,
        "incomplete_details": None, "instructions": None, "model": request.get("model"), "output": output,
        "parallel_tool_calls": True, "temperature": 1, "top_p": 1, "tool_choice": "auto", "tools": [], "usage": usage,
        "metadata": {}, "previous_response_id": request.get("previous_response_id"),
    }  # fmt: skip


def responses_events(whole: Json) -> Iterator[Json]:
    for n, event in enumerate(_responses_events(whole)):
        yield event | {"sequence_number": n}


def _responses_events(whole: Json) -> Iterator[Json]:
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for i, item in enumerate(whole["output"]):
        at = {"output_index": i, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""} if "arguments" in item else {}
        yield {
            "type": "response.output_item.added",
            "output_index": i,
            "item": item | empty | {"status": "in_progress"},
        }
        if item["type"] == "message":
            part, at = item["content"][0], at | {"content_index": 0}
            yield at | {"type": "response.content_part.added", "part": part | {"text": ""}}
            for piece in _pieces(part["text"]):
                yield at | {"type": "response.output_text.delta", "delta": piece, "logprobs": []}
            yield at | {"type": "response.output_text.done", "text": part["text"], "logprobs": []}
            yield at | {"type": "response.content_part.done", "part": part}
        elif item["type"] == "function_call":
            for piece in _pieces(item["arguments"]):
                yield at | {"type": "response.function_call_arguments.delta", "delta": piece}
            done = {"type": "response.function_call_arguments.done", "arguments": item["arguments"]}
            yield at | done | {"name": item["name"]}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": "response.completed", "response": whole}


def messages(request: Json, said: list[Said], new_id: Ids) -> Json:
    one, content = said[0], []
    if one.text is not None:
        content.append({"type": "text", "text": one.text})
    for name, arguments in one.calls:
        content.append({"type": "tool_use", "id": new_id("toolu"), "name": name, "input": arguments})
    return {
        "id": new_id("msg"), "type": "message", "role": "assistant", "model": request.get("model"), "content": content,
        "stop_reason": "tool_use" if one.calls else "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": len(_tokens(one))},
    }  # fmt: skip


def messages_events(whole: Json) -> Iterator[Json]:
    yield {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}
    for i, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = {"text": ""} if is_text else {"input": {}}
        yield {"type": "content_block_start", "index": i, "content_block": block | empty}
        for piece in _pieces(block["text"] if is_text else json.dumps(block["input"])):
            delta = (
                {"type": "text_delta", "text": piece}
                if is_text
                else {"type": "input_json_delta", "partial_json": piece}
            )
            yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def whole_answer(path: str, request: Json, said: list[Said], new_id: Ids) -> Json:
    return {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}[path](
        request, said, new_id
    )


def stream(path: str, whole: Json, request: Json) -> Iterator[bytes]:
    """The answer as server-sent events."""
    if path == "/v1/chat/completions":
        for event in chat_events(whole, request):
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
        return
    for event in responses_events(whole) if path == "/v1/responses" else messages_events(whole):
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def app(answer: Answer) -> web.Application:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answered = await answer(request, body)
        if answered is None:
            await asyncio.sleep(60)
            return web.Response(status=504)
        status, whole = answered
        headers = {"X-Played": str(request.get("number", ""))}
        if status != 200 or not body.get("stream"):
            return web.json_response(whole, status=status, headers=headers)
        response = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in stream(request.path, whole, body):
            await response.write(event)
        return response

    async def models(_: web.Request) -> web.Response:
        entry = {"id": "base", "object": "model", "parent": None, "root": "/", "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [entry]})

    async def operate(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default", "is_paused": False})

    application = web.Application(client_max_size=64 * 2**20)
    for path in PATHS:
        application.router.add_post(path, handle)
    application.router.add_get("/v1/models", models)
    application.router.add_get("/weight_info", operate)
    application.router.add_get("/is_paused", operate)
    return application


def config_of(upstream: str, directory: Path) -> Config:
    """Of a proxy in front of an upstream, its store in a directory."""
    return Config(
        store=StoreConfig(url=f"sqlite:///{directory}/store.db"),
        upstreams=[UpstreamConfig(name="policy", base_url=f"{upstream}/v1")],
        policy=PolicyConfig(publish="merged", directory=directory / "policy"),
    )
