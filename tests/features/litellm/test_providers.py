"""Providers that speak no OpenAI protocol, played from their documented answers, behind a real proxy and litellm."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from support.in_process import proxy_of
from support.sections import PolicyConfig

KEY = "sk-ant-api03-of-the-upstream"
SAY = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": SAY, "tools": [ADD]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": SAY, "max_tokens": 9},
}


class Anthropic:
    """POST /v1/messages as its documentation shows it. The model's name says what is to happen."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.left = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/messages"
        body = await request.json()
        self.requests.append((body, dict(request.headers)))
        headers = {"request-id": "req_1", "anthropic-ratelimit-requests-remaining": "9"}
        kind, _, status = body["model"].partition("-")
        if kind == "error":
            error = {"type": "overloaded_error", "message": f"Overloaded; your key is {request.headers['x-api-key']}"}
            answer = {"type": "error", "error": error, "request_id": "req_1"}
            return web.json_response(answer, status=int(status), headers=headers | {"retry-after": "7"})
        said = request.headers["x-api-key"] if kind == "echoes" else "Zoë"
        text, tool = {"type": "text", "text": said}, {"type": "tool_use", "id": "toolu_1", "name": "add"}
        usage = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0}
        message = {"id": "msg_01", "type": "message", "role": "assistant", "model": body["model"], "usage": usage}
        if not body.get("stream"):
            content = [text, tool | {"input": {"a": 1}}]
            end = {"content": content, "stop_reason": "tool_use", "stop_sequence": None}
            return web.json_response(message | end, headers=headers)
        answer = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        begin = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 1}}
        await _send(answer, "message_start", message=message | begin)
        await _send(answer, "content_block_start", index=0, content_block=text | {"text": ""})
        await _send(answer, "ping")
        await _send(answer, "content_block_delta", index=0, delta={"type": "text_delta", "text": "Zo"})
        if kind == "stalls":
            try:
                await asyncio.sleep(60)
            finally:
                self.left.set()
        if kind == "breaks":
            await _send(answer, "error", error={"type": "overloaded_error", "message": "Overloaded"})
            return answer
        await _send(answer, "content_block_delta", index=0, delta={"type": "text_delta", "text": "ë"})
        await _send(answer, "content_block_stop", index=0)
        await _send(answer, "content_block_start", index=1, content_block=tool | {"input": {}})
        for part in ('{"a"', ": 1}"):
            delta = {"type": "input_json_delta", "partial_json": part}
            await _send(answer, "content_block_delta", index=1, delta=delta)
        await _send(answer, "content_block_stop", index=1)
        delta = {"stop_reason": "tool_use", "stop_sequence": None}
        await _send(answer, "message_delta", delta=delta, usage={"output_tokens": 5})
        await _send(answer, "message_stop")
        return answer


async def _send(answer: web.StreamResponse, kind: str, **event: Any) -> None:
    await answer.write(f"event: {kind}\ndata: {json.dumps({'type': kind, **event})}\n\n".encode())


class Gemini:
    """models/…:generateContent and :streamGenerateContent as their documentation shows them."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((await request.json(), dict(request.headers)))
        model, _, method = request.path.removeprefix("/models/").partition(":")
        if model.startswith("gemini-error"):
            error = {"code": 429, "message": "Quota exceeded", "status": "RESOURCE_EXHAUSTED"}
            return web.json_response({"error": error}, status=429)
        parts: list[dict[str, Any]] = [{"text": "Zoë"}, {"functionCall": {"name": "add", "args": {"a": 1}}}]
        if method == "generateContent":
            return web.json_response(self._answer(model, parts, "STOP"))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for part, reason in zip(parts, (None, "STOP"), strict=True):
            await answer.write(f"data: {json.dumps(self._answer(model, [part], reason))}\r\n\r\n".encode())
        return answer

    def _answer(self, model: str, parts: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        candidate = {"content": {"parts": parts, "role": "model"}, "index": 0}
        usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
        end = {"finishReason": reason} if reason else {}
        return {"candidates": [candidate | end], "usageMetadata": usage, "modelVersion": model, "responseId": "r1"}


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class Proxy:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: Any, rollout: str = "r", **headers: str) -> tuple[int, Any, bytes]:
        url = f"{self.url}/rollouts/{rollout}/v1/{path}"
        async with self.session.post(url, json=body, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    async def calls(self, rollout: str = "r") -> list[dict[str, Any]]:
        async with self.session.get(f"{self.url}/rollouts/{rollout}") as answer:
            return (await answer.json())["calls"]


@asynccontextmanager
async def proxying(tmp_path: Path, *upstreams: UpstreamConfig) -> AsyncIterator[Proxy]:
    config = Config(
        store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
        upstreams=list(upstreams),
        policy=PolicyConfig(publish="merged", directory=tmp_path / "policy"),
    )
    async with proxy_of(config) as url, aiohttp.ClientSession() as session:
        yield Proxy(url, session)


def through_litellm(base_url: str, provider: str, *models: str, **settings: Any) -> UpstreamConfig:
    named = {model: f"{provider}/{model}" for model in models}
    settings.setdefault("api_key", KEY)
    return UpstreamConfig(name=provider, kind="litellm", base_url=base_url, model_map=named, **settings)


@asynccontextmanager
async def anthropic_behind(tmp_path: Path, *models: str, **settings: Any) -> AsyncIterator[tuple[Anthropic, Proxy]]:
    played = Anthropic()
    async with (
        serving(played.answer) as base,
        proxying(tmp_path, through_litellm(base, "anthropic", *models, **settings)) as proxy,
    ):
        yield played, proxy


def test_litellm_is_imported_only_when_it_is_used() -> None:
    script = "import sys, lightning_proxy.proxy.app, lightning_proxy.features.litellm.proxy as u; " \
        "u.LitellmUpstream; sys.exit('litellm' in sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_first_use_calls_nobody_but_the_provider_and_lets_the_event_loop_go_on() -> None:
    script = """
import asyncio, socket, sys
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.features.litellm.proxy import LitellmUpstream
from lightning_proxy.proxy.gateway.upstream import NoConnection, Request

called = []
sys.addaudithook(lambda event, args: called.append(args[1][0]) if event == "socket.connect" else None)

async def beat(beats):
    while True:
        await asyncio.sleep(0.01)
        beats.append(asyncio.get_running_loop().time())

async def main():
    config = UpstreamConfig(
        name="a", kind="litellm", base_url="http://127.0.0.1:9", api_key="of-nobody", models=["anthropic/claude"]
    )
    upstream, beats = LitellmUpstream(config), []
    beating = asyncio.create_task(beat(beats))
    body = b'{"model": "anthropic/claude", "messages": [{"role": "user", "content": "hi"}]}'
    try:
        await upstream.open(Request("POST", "/v1/chat/completions", b"", [], body, True))
    except NoConnection:
        print(len(beats), *called)
    beating.cancel()
    await upstream.close()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    beats, *called = done.stdout.split()
    assert set(called) == {"127.0.0.1"}
    assert int(beats) > 5  # litellm took seconds: an event loop that waits for it has none
    assert done.stderr == ""


async def test_every_recorded_api_reaches_a_provider_of_another_protocol(tmp_path: Path) -> None:
    async with anthropic_behind(tmp_path, "claude") as (played, proxy):
        for path, body in BODIES.items():
            for stream in (False, True):
                if path == "messages" and stream:
                    continue
                status, headers, raw = await proxy.post(path, body | {"model": "claude", "stream": stream})
                assert (status, headers["X-Rollout-Id"], "X-Policy-Version" in headers) == (200, "r", False)
                assert headers["Content-Type"] == ("text/event-stream" if stream else "application/json")
                assert stream or path != "chat/completions" or headers["request-id"] == "req_1"
                assert "Zo" in raw.decode()
        calls = await proxy.calls()
    assert [call["status"] for call in calls] == ["ok"] * 7
    assert {call["untrainable_reason"] for call in calls} == {"the model is not the policy"}
    assert {(call["upstream"], call["model"], call["policy_version"]) for call in calls} == {
        ("anthropic", "anthropic/claude", None)
    }
    whole, streamed = calls[0], calls[1]
    for call in (whole, streamed):
        [tool] = call["tool_calls"]
        assert (tool["id"], tool["name"], json.loads(tool["arguments"])) == ("toolu_1", "add", {"a": 1})
        assert call["finish_reason"] == "tool_calls"
        assert call["response"]["choices"][0]["message"]["content"] == "Zoë"
    assert whole["usage"]["prompt_tokens"] == 13
    assert calls[6]["response"]["content"][0] == {"type": "text", "text": "Zoë"}
    assert {headers["x-api-key"] for _, headers in played.requests} == {KEY}


async def test_gemini_answers_all_apis_with_tool_calls(tmp_path: Path) -> None:
    played = Gemini()
    async with (
        serving(played.answer) as base,
        proxying(tmp_path, through_litellm(base, "gemini", "gemini-2.5-flash")) as proxy,
    ):
        for path, body in BODIES.items():
            for stream in (False, True):
                asked = body | {"model": "gemini-2.5-flash", "stream": stream}
                status, _, raw = await proxy.post(path, asked)
                assert (status, "Zo" in raw.decode()) == (200, True), raw
        calls = await proxy.calls()
    assert [call["status"] for call in calls] == ["ok"] * 8
    for call in (*calls[:2], *calls[4:]):
        assert [(tool["name"], json.loads(tool["arguments"])) for tool in call["tool_calls"]] == [("add", {"a": 1})]
    assert {headers["x-goog-api-key"] for _, headers in played.requests} == {KEY}


async def test_openais_client_works_with_a_provider_of_another_protocol(tmp_path: Path) -> None:
    async with anthropic_behind(tmp_path, "claude", "echoes") as (_, proxy):
        _, _, raw = await proxy.post("chat/completions", {"model": "echoes", "messages": SAY})
        assert json.loads(raw)["choices"][0]["message"]["content"] == "*" * len(KEY), "keys are masked"
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/rollouts/r/v1", api_key="unused", max_retries=0)
        asked: dict[str, Any] = {"model": "claude", "messages": SAY, "tools": [ADD]}
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        listed = [model.id async for model in client.models.list()]
        await client.close()
    for answer in (whole, streamed):
        assert answer.choices[0].message.content == "Zoë"
        assert answer.choices[0].message.tool_calls[0].function.name == "add"
    assert listed == ["claude", "echoes", "policy"]


@pytest.mark.parametrize("status", [401, 529])
async def test_a_providers_error_has_its_status_and_retry_after_and_no_key(
    tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with anthropic_behind(tmp_path, f"error-{status}") as (_, proxy):
        for path, stream in itertools.product(BODIES, (False, True)):
            if path == "messages" and stream:
                continue
            asked = BODIES[path] | {"model": f"error-{status}", "stream": stream}
            got, headers, raw = await proxy.post(path, asked)
            assert (path, got, headers["Retry-After"]) == (path, status, "7")
            error = json.loads(raw)["error"]
            assert "Overloaded" in error["message"]
            assert KEY not in raw.decode()
        calls = await proxy.calls()
    assert {(call["status"], call["http_status"]) for call in calls} == {("error", status)}
    assert KEY not in json.dumps(calls)
    assert KEY not in caplog.text
    assert KEY.encode() not in (tmp_path / "store.db").read_bytes()


async def test_a_stream_that_fails_at_the_provider_is_broken_and_recorded_as_error(tmp_path: Path) -> None:
    async with anthropic_behind(tmp_path, "breaks") as (_, proxy):
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.post("chat/completions", {"model": "breaks", "messages": SAY, "stream": True})
        [call] = await proxy.calls()
    assert (call["status"], call["response"]["choices"][0]["message"]["content"]) == ("error", "Zo")
    assert "Overloaded" in call["error"]


async def test_a_provider_that_stalls_or_is_away_is_a_gateways_error(tmp_path: Path) -> None:
    async with anthropic_behind(tmp_path, "stalls", idle_timeout_s=0.3) as (_, proxy):
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.post("chat/completions", {"model": "stalls", "messages": SAY, "stream": True})
        [call] = await proxy.calls()
        assert "nothing for 0.3 s" in call["error"]
    gone = through_litellm("http://127.0.0.1:9", "anthropic", "claude", retries=1, retry_wait_s=0.01)
    async with proxying(tmp_path, gone) as proxy:
        status, _, raw = await proxy.post("chat/completions", {"model": "claude", "messages": SAY})
    assert (status, "cannot be reached" in json.loads(raw)["error"]["message"]) == (502, True)


async def test_an_agent_that_leaves_ends_the_providers_stream(tmp_path: Path) -> None:
    async with anthropic_behind(tmp_path, "stalls") as (played, proxy):
        url = f"{proxy.url}/rollouts/r/v1/chat/completions"
        asked = {"model": "stalls", "messages": SAY, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url, json=asked) as answer:
            await answer.content.readany()
        await asyncio.wait_for(played.left.wait(), 10)
        for _ in range(100):  # the provider is left before the end is recorded
            [call] = await proxy.calls()
            if call["status"] != "incomplete":
                break
            await asyncio.sleep(0.1)
    assert call["status"] == "cancelled"


async def test_what_an_agent_sends_cannot_steer_litellm(tmp_path: Path) -> None:
    evil = {
        "api_base": "http://127.0.0.1:9", "base_url": "http://127.0.0.1:9", "api_key": "other-key", "num_retries": 3,
        "mock_response": "mocked", "custom_llm_provider": "openai", "extra_headers": {"x-evil": "1"},
        "metadata": {"x": 1}, "fallbacks": ["openai/gpt-4o"], "litellm_metadata": {}, "success_callback": ["lago"],
    }  # fmt: skip
    async with anthropic_behind(tmp_path, "claude") as (played, proxy):
        for path, body in BODIES.items():
            status, _, raw = await proxy.post(path, evil | body | {"model": "claude"})
            assert (status, "mocked" in raw.decode()) == (200, False)
        assert len(played.requests) == len(BODIES)
        assert {headers["x-api-key"] for _, headers in played.requests} == {KEY}
        assert not any("x-evil" in headers for _, headers in played.requests)
        for model in ("openai/gpt-4o", "anthropic/other", "huggingface/http://127.0.0.1:9", 5, None):
            status, _, raw = await proxy.post("chat/completions", {"model": model, "messages": SAY})
            assert (status, "serves" in json.loads(raw)["error"]["message"]) == (404, True)


async def test_a_url_in_a_request_is_not_called(tmp_path: Path) -> None:
    fetched = []

    async def image(request: web.Request) -> web.Response:
        fetched.append(request.path)
        return web.Response(body=b"x")

    played = Gemini()
    async with (
        serving(image) as trap,
        serving(played.answer) as base,
        proxying(tmp_path, through_litellm(base, "gemini", "gemini-2.5-flash")) as proxy,
    ):
        content = [{"type": "image_url", "image_url": {"url": f"{trap}/x.png"}}]
        asked = {"model": "gemini-2.5-flash", "messages": [{"role": "user", "content": content}]}
        status, _, _ = await proxy.post("chat/completions", asked)
    assert (status, fetched) == (400, [])


async def test_what_litellm_cannot_do_is_a_clear_error_before_the_provider_is_asked(tmp_path: Path) -> None:
    async with anthropic_behind(tmp_path, "claude") as (played, proxy):
        status, _, raw = await proxy.post("audio/speech", {"model": "claude", "input": "hi"})
        assert (status, "kind litellm has no POST /v1/audio/speech" in raw.decode()) == (501, True)
        status, _, raw = await proxy.post("messages", BODIES["messages"] | {"model": "claude", "stream": True})
        assert (status, "docs/providers.md" in raw.decode()) == (501, True)
        status, _, raw = await proxy.post("chat/completions", {"model": "claude", "messages": SAY, "logprobs": True})
        assert (status, "logprobs" in raw.decode()) == (400, True)
        for messages in ("hi", [], ["hi"]):
            status, _, raw = await proxy.post("chat/completions", {"model": "claude", "messages": messages})
            assert (status, "messages must be a list of objects" in raw.decode()) == (400, True)
        assert played.requests == []


async def test_without_a_key_of_its_own_the_provider_gets_the_agents(tmp_path: Path) -> None:
    async with anthropic_behind(tmp_path, "claude", api_key=None) as (played, proxy):
        asked = {"model": "claude", "messages": SAY}
        await proxy.post("chat/completions", asked, Authorization="Bearer of-the-agent")
    assert played.requests[0][1]["x-api-key"] == "of-the-agent"


async def test_embeddings_go_through_unrecorded(tmp_path: Path) -> None:
    async def embed(request: web.Request) -> web.Response:
        body = await request.json()
        assert (request.path, body["model"], body["input"]) == ("/v1/embeddings", "e5", ["a"])
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
        return web.json_response({"object": "list", "data": data, "model": "e5", "usage": {"prompt_tokens": 1}})

    async with (
        serving(embed) as base,
        proxying(tmp_path, through_litellm(f"{base}/v1", "hosted_vllm", "e5")) as proxy,
    ):
        status, _, raw = await proxy.post("embeddings", {"model": "e5", "input": ["a"]})
    assert (status, json.loads(raw)["data"][0]["embedding"]) == (200, [0.5, -1.0])


async def test_anthropics_own_api_needs_no_litellm(tmp_path: Path) -> None:
    played = Anthropic()
    async with serving(played.answer) as base:
        raw_upstream = UpstreamConfig(
            name="anthropic", kind="openai", base_url=f"{base}/v1", api_key=KEY, api_key_header="x-api-key"
        )
        async with proxying(tmp_path, raw_upstream) as proxy:
            asked = BODIES["messages"] | {"model": "claude", "stream": True}
            status, _, raw = await proxy.post("messages", asked, Authorization="Bearer of-the-agent")
            [call] = await proxy.calls()
    [(body, headers)] = played.requests
    assert (status, body, headers["x-api-key"], "Authorization" in headers) == (200, asked, KEY, False)
    assert b"event: ping" in raw
    assert call["response"]["content"][1]["input"] == {"a": 1}
