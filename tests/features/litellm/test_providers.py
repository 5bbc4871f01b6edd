"""Providers that speak no OpenAI protocol, played from their documented answers, behind a real proxy and litellm."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from traffic.server import messages_events

from contract.raw import Upstream
from contract.system import Answer, Json, Proxy, in_this_process, played, wait_until

KEY = "sk-ant-api03-of-the-upstream"
SAY = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": SAY, "tools": [ADD]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": SAY, "max_tokens": 9},
}


class Anthropic(Upstream):
    """POST /v1/messages as its documentation shows it. The model's name says what is to happen."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[Json, dict[str, str]]] = []
        self.left = threading.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
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
        tool = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
        message = {
            "id": "msg_01", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None,
            "content": [{"type": "text", "text": said}, tool], "stop_reason": "tool_use",
            "usage": {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 3},
        }  # fmt: skip
        if not body.get("stream"):
            return web.json_response(message, headers=headers)
        answer = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        start, block, *events = messages_events(message, len(said) if kind == "echoes" else len("Zo"))
        for event in (start, block, {"type": "ping"}, *events):
            await answer.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
            if event is events[0] and kind == "stalls":
                try:
                    await asyncio.sleep(60)
                finally:
                    self.left.set()
            if event is events[0] and kind == "breaks":
                error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
                await answer.write(f"event: error\ndata: {json.dumps(error)}\n\n".encode())
                break
        return answer


def through_litellm(base_url: str, provider: str, *models: str, **settings: Any) -> Json:
    named = {model: f"{provider}/{model}" for model in models}
    return {"name": provider, "kind": "litellm", "base_url": base_url, "model_map": named, "api_key": KEY} | settings


@contextmanager
def anthropic_behind(tmp_path: Path, *models: str, **settings: Any) -> Iterator[tuple[Anthropic, Proxy]]:
    with played(anthropic := Anthropic()) as base:
        upstreams = [through_litellm(base, "anthropic", *models, **settings)]
        with in_this_process(tmp_path, upstreams=upstreams) as proxy:
            yield anthropic, proxy


def ask(proxy: Proxy, model: Any, path: str = "chat/completions", rollout: str = "r", **fields: Any) -> Answer:
    body = (BODIES.get(path) or {"input": "hi"}) | {"model": model} | fields
    return proxy.post(f"/rollouts/{rollout}/v1/{path}", body)


# What litellm cannot stream is left out.
WAYS = [way for way in itertools.product(BODIES, (False, True)) if way != ("messages", True)]


FIRST_USE = """
import asyncio, socket, sys
import lightning_proxy.proxy.app
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.features.litellm.proxy import LitellmUpstream
from lightning_proxy.proxy.gateway.upstream import NoConnection, Request

called, beats = [], []
sys.addaudithook(lambda event, args: called.append(args[1][0]) if event == "socket.connect" else None)

async def beat():
    while True:
        await asyncio.sleep(0.01)
        beats.append(1)

async def main():
    config = UpstreamConfig(
        name="a", kind="litellm", base_url="http://127.0.0.1:9", api_key="of-nobody", models=["anthropic/claude"]
    )
    upstream, imported = LitellmUpstream(config), "litellm" in sys.modules
    beating = asyncio.create_task(beat())
    body = b'{"model": "anthropic/claude", "messages": [{"role": "user", "content": "hi"}]}'
    try:
        await upstream.open(Request("POST", "/v1/chat/completions", b"", [], body, True))
    except NoConnection:
        print(imported, len(beats), *called)
    beating.cancel()
    await upstream.close()

asyncio.run(main())
"""


def test_the_first_use_imports_litellm_calls_nobody_but_the_provider_and_lets_the_event_loop_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USE], check=True, capture_output=True, text=True)
    imported, beats, *called = done.stdout.split()
    assert (imported, {*called}, done.stderr) == ("False", {"127.0.0.1"}, "")
    assert int(beats) > 5  # litellm took seconds: an event loop that waits for it has none


def test_every_recorded_api_reaches_a_provider_of_another_protocol(tmp_path: Path) -> None:
    with anthropic_behind(tmp_path, "claude") as (anthropic, proxy):
        for path, stream in WAYS:
            answer = ask(proxy, "claude", path, stream=stream)
            assert (answer.status, answer.headers["x-rollout-id"]) == (200, "r")
            assert "x-policy-version" not in answer.headers and "Zo" in answer.body.decode()
            assert answer.headers["content-type"] == ("text/event-stream" if stream else "application/json")
            if (path, stream) == ("chat/completions", False):
                limits = answer.headers["anthropic-ratelimit-requests-remaining"]
                assert (answer.headers["request-id"], limits) == ("req_1", "9"), "the provider's own reach the agent"
        calls = proxy.rollout("r")["calls"]
    fields = ("status", "untrainable_reason", "upstream", "model", "policy_version")
    expected = ["ok", "the model is not the policy", "anthropic", "anthropic/claude", None]
    assert [[call[field] for field in fields] for call in calls] == [expected] * 7
    for call in calls[:2]:
        (tool,) = call["tool_calls"]
        assert (tool["id"], tool["name"], json.loads(tool["arguments"])) == ("toolu_1", "add", {"a": 1})
        assert call["finish_reason"] == "tool_calls"
        assert call["response"]["choices"][0]["message"]["content"] == "Zoë"
    assert calls[0]["usage"]["prompt_tokens"] == 13
    assert calls[6]["response"]["content"][0] == {"type": "text", "text": "Zoë"}
    assert {headers["x-api-key"] for _, headers in anthropic.requests} == {KEY}


def test_a_providers_error_has_its_status_and_retry_after_and_no_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    statuses = (400, 401, 429, 500, 529)
    with anthropic_behind(tmp_path, "echoes", *(f"error-{status}" for status in statuses)) as (_, proxy):
        for status in statuses:
            for path, stream in WAYS:
                answer = ask(proxy, f"error-{status}", path, f"r{status}", stream=stream)
                assert (path, answer.status, answer.headers["retry-after"]) == (path, status, "7")
                assert "Overloaded" in answer.error["message"] and KEY not in answer.body.decode()
            calls = proxy.rollout(f"r{status}")["calls"]
            assert {(call["status"], call["http_status"]) for call in calls} == {("error", status)}
            assert KEY not in json.dumps(calls)
        said = ask(proxy, "echoes").json["choices"][0]["message"]["content"]
        assert said == "*" * len(KEY), "masked in answers too"
        assert KEY not in (streamed := ask(proxy, "echoes", stream=True).body.decode()) and "*" * len(KEY) in streamed
    assert KEY not in caplog.text and KEY.encode() not in (tmp_path / "store.db").read_bytes()


def test_a_provider_that_fails_stalls_or_is_away_is_a_broken_answer_or_a_gateways_error(tmp_path: Path) -> None:
    with anthropic_behind(tmp_path, "breaks", "stalls", idle_timeout_s=0.3) as (_, proxy):
        for model, why in (("breaks", "Overloaded"), ("stalls", "nothing for 0.3 s")):
            with pytest.raises(httpx.HTTPError):
                ask(proxy, model, rollout=model, stream=True)
            (call,) = proxy.rollout(model)["calls"]
            assert (call["status"], call["response"]["choices"][0]["message"]["content"]) == ("error", "Zo")
            assert why in call["error"]
    gone = through_litellm("http://127.0.0.1:9", "anthropic", "claude", retries=1, retry_wait_s=0.01)
    with in_this_process(tmp_path, upstreams=[gone]) as proxy:
        answer = ask(proxy, "claude")
        assert answer.status == 502 and "cannot be reached" in answer.error["message"]


def test_an_agent_that_leaves_ends_the_providers_stream(tmp_path: Path) -> None:
    with anthropic_behind(tmp_path, "stalls") as (anthropic, proxy):
        url = f"{proxy.url}/rollouts/r/v1/chat/completions"
        asked = {"model": "stalls", "messages": SAY, "stream": True}
        with httpx.stream("POST", url, json=asked, trust_env=False) as answer:
            next(answer.iter_raw())
        assert anthropic.left.wait(10)  # which is before the end is recorded
        wait_until(lambda: proxy.rollout("r")["calls"][0]["status"] == "cancelled", 20, "it is cancelled")


def test_without_a_key_of_its_own_the_provider_gets_the_agents_but_none_of_ours(tmp_path: Path) -> None:
    with anthropic_behind(tmp_path, "claude", api_key=None) as (anthropic, proxy):
        (opened,) = proxy.post("/rollouts", {}).json
        for key in ("of-the-agent", opened["api_key"]):
            proxy.post("/rollouts/r/v1/chat/completions", BODIES["chat/completions"] | {"model": "claude"}, key)
    keys = [headers.get("x-api-key") for _, headers in anthropic.requests]
    assert keys[:1] == ["of-the-agent"] and opened["api_key"] not in keys


def test_what_an_agent_sends_cannot_steer_litellm(tmp_path: Path) -> None:
    evil: Json = {
        "api_base": "http://127.0.0.1:9", "base_url": "http://127.0.0.1:9", "api_key": "other-key", "num_retries": 3,
        "mock_response": "mocked", "custom_llm_provider": "openai", "extra_headers": {"x-evil": "1"},
        "metadata": {"x": 1}, "fallbacks": ["openai/gpt-4o"], "litellm_metadata": {}, "success_callback": ["lago"],
    }  # fmt: skip
    with anthropic_behind(tmp_path, "claude") as (anthropic, proxy):
        for path in BODIES:
            answer = ask(proxy, "claude", path, **evil)
            assert (answer.status, "mocked" in answer.body.decode()) == (200, False)
        assert len(anthropic.requests) == len(BODIES)
        assert {headers["x-api-key"] for _, headers in anthropic.requests} == {KEY}
        assert not any("x-evil" in headers for _, headers in anthropic.requests)
        for model in ("openai/gpt-4o", "anthropic/other", "huggingface/http://127.0.0.1:9", 5, None):
            answer = ask(proxy, model)
            assert (answer.status, "serves" in answer.error["message"]) == (404, True)


def test_a_url_in_a_request_is_not_called(tmp_path: Path) -> None:
    nowhere = through_litellm("http://127.0.0.1:9", "gemini", "gemini-2.5-flash")
    with played(trap := Upstream()) as url, in_this_process(tmp_path, upstreams=[nowhere]) as proxy:
        content = [{"type": "image_url", "image_url": {"url": f"{url}/x.png"}}]
        answer = ask(proxy, "gemini-2.5-flash", messages=[{"role": "user", "content": content}])
    assert (answer.status, trap.seen) == (400, [])


def test_what_litellm_cannot_do_is_a_clear_error_before_the_provider_is_asked(tmp_path: Path) -> None:
    with anthropic_behind(tmp_path, "claude") as (anthropic, proxy):
        for path, fields, status, told in (
            ("audio/speech", {}, 501, "kind litellm does not support POST /v1/audio/speech"),
            ("messages", {"stream": True}, 501, "docs/providers.md"),
            ("chat/completions", {"logprobs": True}, 400, "logprobs"),
            ("chat/completions", {"messages": "hi"}, 400, "messages must be a non-empty list of objects"),
            ("chat/completions", {"messages": ["hi"]}, 400, "messages must be a non-empty list of objects"),
        ):
            answer = ask(proxy, "claude", path, **fields)
            assert (answer.status, told in answer.error["message"]) == (status, True), answer.body
        assert anthropic.requests == []


def test_embeddings_go_through_unrecorded(tmp_path: Path) -> None:
    provider = Upstream()
    provider.pieces = [b'{"object": "list", "data": [{"index": 0, "embedding": [0.5, -1.0]}], "model": "e5"}']
    with played(provider) as base:
        upstreams = [through_litellm(f"{base}/v1", "hosted_vllm", "e5")]
        with in_this_process(tmp_path, upstreams=upstreams) as proxy:
            answer = ask(proxy, "e5", "embeddings", input=["a"])
            assert (answer.status, answer.json["data"][0]["embedding"]) == (200, [0.5, -1.0])
            assert proxy.call("GET", "/rollouts/r").status == 404
    (seen,) = provider.seen
    assert seen.target == "/v1/embeddings" and json.loads(seen.body)["input"] == ["a"]


def test_anthropics_own_api_needs_no_litellm(tmp_path: Path) -> None:
    with played(anthropic := Anthropic()) as base:
        own = {"name": "anthropic", "kind": "openai", "base_url": f"{base}/v1", "api_key": KEY}
        with in_this_process(tmp_path, upstreams=[own | {"api_key_header": "x-api-key"}]) as proxy:
            asked = BODIES["messages"] | {"model": "claude", "stream": True}
            answer = proxy.post("/rollouts/r/v1/messages", asked, "of-the-agent")
            (call,) = proxy.rollout("r")["calls"]
    ((body, headers),) = anthropic.requests
    assert (answer.status, body, headers["x-api-key"], "Authorization" in headers) == (200, asked, KEY, False)
    assert b"event: ping" in answer.body and call["response"]["content"][1]["input"] == {"a": 1}
