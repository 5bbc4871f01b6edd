"""Other model servers behind `kind: vllm`: played from what they document, none of them was run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

ASK = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def logprobs(*ids: int) -> dict[str, Any]:
    entries = [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []} for _ in range(2)]
    return {"content": [entry | {"id": own} for entry, own in zip(entries, ids, strict=True)] if ids else entries}


def whole(choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "aa"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"} | choice
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": USAGE} | more


def streamed(*chunks: dict[str, Any]) -> web.Response:
    frames = [*map(json.dumps, chunks), "[DONE]"]
    return web.Response(text="".join(f"data: {frame}\n\n" for frame in frames), content_type="text/event-stream")


async def sglang(request: web.Request) -> web.Response:
    """SGLang since July 2026: ids of prompt and answer in each choice of whole answers (pull request 30917)."""
    body = await request.json()
    if body.get("stream"):
        if body.get("return_token_ids"):
            error = {"object": "error", "message": "return_token_ids is not supported with stream=true", "code": 400}
            return web.json_response(error, status=400)
        return streamed({"id": "x", "choices": [{"index": 0, "delta": {"content": "aa"}, "finish_reason": "stop"}]})
    ids = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]} if body.get("return_token_ids") else {}
    return web.json_response(whole({"logprobs": logprobs() if body.get("logprobs") else None, **ids}))


async def llama_cpp(request: web.Request) -> web.Response:
    """llama.cpp's server: the answer's ids among the log-probabilities, which it refuses for streams with tools."""
    body = await request.json()
    if body.get("stream") and body.get("tools") and body.get("logprobs"):
        error = {
            "code": 400,
            "message": "logprobs is not supported with tools + stream",
            "type": "invalid_request_error",
        }
        return web.json_response({"error": error}, status=400)
    if body.get("stream"):
        return streamed({"id": "x", "choices": [{"index": 0, "delta": {"content": "aa"}, "finish_reason": "stop"}]})
    more = {"logprobs": logprobs(4, 5)} if body.get("logprobs") else {}
    return web.json_response(whole(more, timings={"predicted_n": 2}))


async def ollama(request: web.Request) -> web.Response:
    """Ollama's server: it ignores fields that it does not know."""
    body = await request.json()
    if body.get("stream"):
        return streamed({"id": "x", "choices": [{"index": 0, "delta": {"content": "aa"}, "finish_reason": "stop"}]})
    more = {"logprobs": logprobs()} if body.get("logprobs") else {}
    return web.json_response(whole(more, system_fingerprint="fp_ollama"))


def as_sent(answer: dict[str, Any]) -> dict[str, Any]:
    for choice in answer["choices"]:
        choice.setdefault("logprobs", None)
    return answer


@pytest.mark.parametrize(("server", "trainable"), [(sglang, True), (llama_cpp, False), (ollama, False)])
async def test_a_server_is_recorded_and_trained_on_where_it_gives_tokens(
    running: Any, tmp_path: Any, server: Answer, trainable: bool
) -> None:
    async with running(tmp_path) as system:
        system.vllm.odd, system.vllm.plain = server, True
        directly = f"{system.config.upstreams[0].base_url}/chat/completions"
        for tools, stream in itertools.product(([], [{"type": "function", "function": {"name": "f"}}]), (False, True)):
            body, rollout = ASK | {"stream": stream} | ({"tools": tools} if tools else {}), f"r{stream}{len(tools)}"
            async with system.session.post(directly, json=body) as answer:
                own = await answer.read()
            to = f"{system.url}/rollouts/{rollout}/v1/chat/completions"
            async with system.session.post(to, json=body) as answer:
                assert answer.status == 200
                seen = await answer.read()
            if stream:
                assert seen == own
            else:  # null where llama.cpp and Ollama have no log-probabilities
                assert as_sent(json.loads(seen)) == as_sent(json.loads(own))
            (call,) = (await system.call("GET", f"/rollouts/{rollout}"))[1]["calls"]
            assert call["trainable"] is (trainable and not stream)
            assert call["trainable"] or call["untrainable_reason"] == "no token ids from the upstream"
