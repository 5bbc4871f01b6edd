"""The relay under a real uvicorn, between a real client and upstreams that speak vLLM's dialect or misbehave."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from aiohttp import web

from support.relaying import MemoryRecorder, relaying

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "temperature": 1}
IDS, LOGPROBS, PROMPT = [7, 8], [-0.5, -1e-05], [1, 2, 3]
USAGE = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}


class FakeVllm:
    """Answers as vLLM 0.32 does, shaped by what it is asked for; keeps the requests it saw."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, dict[str, str]]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_route("*", "/v1/{rest:.*}", self.echo)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "base"}]})

    async def echo(self, request: web.Request) -> web.Response:
        body = {"method": request.method, "path": request.path_qs, "body": (await request.read()).decode()}
        return web.json_response(body | {"headers": dict(request.headers)}, status=207, headers={"X-Up": "stream"})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((body, {k.lower(): v for k, v in request.headers.items()}))
        if body.get("model") != "base":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if not isinstance(body.get("stream", False), bool):
            return web.json_response({"error": {"message": "stream must be a boolean"}}, status=400)
        asked = bool(body.get("return_token_ids")), bool(body.get("logprobs"))
        if not body.get("stream"):
            return web.json_response(_whole(*asked), dumps=_dumps, headers={"X-Up": "whole"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in _chunks(*asked, (body.get("stream_options") or {}).get("include_usage")):
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _logprobs(logprobs: bool, *values: float) -> Any:
    return {"content": [{"token": "é", "logprob": value} for value in values]} if logprobs else None


def _whole(ids: bool, logprobs: bool) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hé"}, "logprobs": _logprobs(logprobs, *LOGPROBS)}
    choice |= {"finish_reason": "stop", "token_ids": IDS if ids else None}
    return {
        "id": "c",
        "model": "base",
        "choices": [choice],
        "usage": USAGE,
        "prompt_token_ids": PROMPT if ids else None,
    }


def _chunks(ids: bool, logprobs: bool, usage: bool) -> list[dict[str, Any]]:
    top = {"id": "c", "object": "chat.completion.chunk", "model": "base"}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunks: list[dict[str, Any]] = [top | {"choices": [role], "prompt_token_ids": PROMPT if ids else None}]
    for i, (text, finish) in enumerate((("h", None), ("é", "stop"))):
        choice = {"index": 0, "delta": {"content": text}, "logprobs": _logprobs(logprobs, LOGPROBS[i])}
        choice |= {"finish_reason": finish, "token_ids": IDS[i : i + 1] if ids else None}
        chunks.append(top | {"choices": [choice]})
    if usage:
        return [*chunks, top | {"choices": [], "usage": USAGE, "system_fingerprint": "fp"}]
    return [*chunks[:-1], chunks[-1] | {"system_fingerprint": "fp"}]


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def vllm_and_proxy(recorder: Any = None, **upstream: Any) -> AsyncIterator[tuple[FakeVllm, str, str, Any]]:
    fake, recorder = FakeVllm(), recorder or MemoryRecorder()
    async with serving(fake.app()) as direct, relaying(direct, recorder, **upstream) as proxied:
        yield fake, direct, proxied, recorder


async def post(url: str, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any, bytes]:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + path, data=data, headers={"Content-Type": "application/json"} | headers) as response,
    ):
        return response.status, response.headers, await response.read()


ASKED = [{}, {"return_token_ids": True}, {"logprobs": True}, {"return_token_ids": True, "logprobs": True}]
STREAMED = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("stream", STREAMED)
async def test_the_agent_gets_the_bytes_of_a_direct_call_and_the_record_has_the_tokens(asked, stream):
    async with vllm_and_proxy() as (_, direct, proxied, recorder):
        body = CHAT | asked | stream
        _, _, expected = await post(direct, body | {"model": "base"})
        status, headers, got = await post(proxied, body)
    assert got == expected
    assert status == 200
    [start], [end] = recorder.starts, recorder.ends
    assert (headers["X-Call-Id"], headers["X-Policy-Version"]) == (start.call_id, "3")
    assert headers["X-Rollout-Id"] == start.rollout.rollout_id == end.rollout_id
    assert (start.request, start.model, start.endpoint) == (body, "base", "chat/completions")
    assert (end.status, end.trainable, end.http_status) == ("ok", True, 200)
    assert (list(end.prompt_token_ids), list(end.choices[0].token_ids)) == (PROMPT, IDS)
    assert list(end.choices[0].logprobs) == LOGPROBS
    assert end.response["choices"][0]["message"]["content"] == "hé"


async def test_the_openai_client_works_unchanged():
    async with (
        vllm_and_proxy() as (_, _, proxied, recorder),
        openai.AsyncOpenAI(base_url=f"{proxied}/rollouts/r1/agents/a/v1", api_key="k") as client,
    ):
        answer = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(**CHAT, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        models = [model.id async for model in await client.models.list()]
    assert answer.choices[0].message.content == text == "hé"
    assert models == ["base", "policy"]
    assert {(s.rollout.rollout_id, s.rollout.agent) for s in recorder.starts} == {("r1", "a")}


async def test_nothing_is_added_for_an_openai_upstream_and_its_key_replaces_the_agents():
    async with vllm_and_proxy(kind="openai", api_key="upstream-key") as (fake, _, proxied, recorder):
        await post(proxied, CHAT, Authorization="Bearer agent-key", **{"X-Rollout-Id": "r", "X-Keep": "1"})
    [(body, headers)] = fake.requests
    assert body == CHAT | {"model": "base"}
    assert headers["authorization"] == "Bearer upstream-key"
    assert headers["x-keep"] == "1"
    assert "x-rollout-id" not in headers
    assert recorder.ends[0].untrainable_reason == "no token ids from the upstream"


async def test_an_upstream_error_passes_through_and_is_recorded():
    async with vllm_and_proxy() as (_, direct, proxied, recorder):
        body = CHAT | {"model": "nope"}
        assert (await post(direct, body))[::2] == (await post(proxied, body))[::2]
    assert (recorder.ends[0].status, recorder.ends[0].http_status) == ("error", 404)
    assert recorder.ends[0].response == {"error": {"message": "no such model"}}


async def test_other_routes_pass_through_unrecorded():
    async with vllm_and_proxy() as (_, _, proxied, recorder):
        status, headers, raw = await post(proxied, {"model": "policy", "x": 1}, "/v1/embeddings?a=b%20c")
    seen = orjson.loads(raw)
    assert (status, headers["X-Up"], seen["path"]) == (207, "stream", "/v1/embeddings?a=b%20c")
    assert orjson.loads(seen["body"]) == {"model": "base", "x": 1}
    assert recorder.starts == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter/",
        "/v1/%6Coad_lora_adapter",
        "/v1/LOAD_lora_adapter",
        "/v1/x/..%2f..%2fpause",
        "/v1/%2e%2e/pause",
        "/v1//load_lora_adapter",
        "/v1/.%2Fload_lora_adapter",
        "/v1/x%5c..",
        "/v1/a%0db",
        "/rollouts/r/v1/load_lora_adapter",
        "/rollouts/a%2Fb/v1/models",
        "/pause",
    ],
)
async def test_operator_routes_and_ambiguous_paths_are_not_reachable(path):
    async with vllm_and_proxy() as (_, _, proxied, _):
        with socket.create_connection(("127.0.0.1", int(proxied.rsplit(":", 1)[1]))) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"", {}, 400),
        (b'{"a": NaN}', {}, 400),
        (b'{"a": "\xff"}', {}, 400),
        (b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}", {}, 400),
        (CHAT, {"X-Rollout-Id": "a b"}, 400),
        (CHAT, {"X-Rollout-Mode": "maybe"}, 400),
        (CHAT, {"Authorization": "Bearer wrong"}, 401),
        (CHAT | {"pad": "x" * 10_000}, {}, 413),
    ],
)
async def test_bad_input_is_refused_in_openais_shape(body, headers, status):
    async with vllm_and_proxy() as (_, _, proxied, recorder):
        got, _, raw = await post(proxied, body, **headers)
    assert got == status
    assert "error" in orjson.loads(raw)
    assert recorder.starts == []


@pytest.mark.parametrize(
    "odd", [{"model": 5}, {"stream": "yes", "messages": 3, "n": [], "temperature": "hot", "stream_options": 1}]
)
async def test_fields_of_a_wrong_type_are_left_for_the_upstream_to_judge(odd):
    async with vllm_and_proxy() as (_, direct, proxied, recorder):
        assert (await post(direct, {"model": "base"} | odd))[::2] == (await post(proxied, CHAT | odd))[::2]
    assert recorder.ends[0].error.startswith("the upstream answered 40")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
async def test_json_in_another_encoding_is_read_as_vllm_reads_it(encoding):
    async with vllm_and_proxy() as (fake, _, proxied, recorder):
        said = CHAT | {"messages": [{"role": "user", "content": "é😀"}]}
        status, _, _ = await post(proxied, json.dumps(said, ensure_ascii=False).encode(encoding))
        assert (status, recorder.ends[0].trainable) == (200, True)
        _, _, raw = await post(proxied, '{"model":"policy"}'.encode(encoding), "/v1/embeddings")
    assert recorder.starts[0].request == said and fake.requests[0][0]["messages"] == said["messages"]
    assert orjson.loads(orjson.loads(raw)["body"]) == {"model": "base"}


async def test_a_compressed_request_is_unpacked_where_it_is_recorded_and_left_as_it_is_elsewhere():
    packed = {"Content-Encoding": "gzip"}
    async with vllm_and_proxy() as (fake, _, proxied, recorder):
        status, _, _ = await post(proxied, gzip.compress(orjson.dumps(CHAT)), **packed)
        assert (status, recorder.starts[0].request, recorder.ends[0].trainable) == (200, CHAT, True)
        assert "content-encoding" not in fake.requests[0][1]
        large = gzip.compress(orjson.dumps(CHAT | {"pad": "x" * 10_000}))
        for body, encoding, expected in ((large, "gzip", 413), (b"no gzip", "gzip", 400), (b"\xce\xb2", "br", 415)):
            status, _, raw = await post(proxied, body, **{"Content-Encoding": encoding})
            assert status == expected and encoding in orjson.loads(raw)["error"]["message"] + "gzip"
        assert len(recorder.starts) == 1
        assert (await post(proxied, CHAT, **{"Content-Encoding": "utf-8"}))[0] == 200, "servers do not look at it"
        _, _, raw = await post(proxied, b"packed", "/v1/files", **{"Content-Encoding": "own"})
        assert orjson.loads(raw)["headers"]["Content-Encoding"] == "own"


async def test_text_that_utf8_cannot_hold_reaches_the_upstream_as_it_was():
    async with vllm_and_proxy() as (fake, _, proxied, recorder):
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "a\\ud800b"}]}'
        status, _, _ = await post(proxied, body)
    assert status == 200
    assert fake.requests[0][0]["messages"] == [{"role": "user", "content": "a\ud800b"}]
    assert recorder.starts[0].request["messages"] == fake.requests[0][0]["messages"]


HALVES = [b'"a\\ud83d"', b'"\\ude00b"']  # as servers send a character that they cut in two


@pytest.mark.parametrize("kind", ["openai", "vllm"])
async def test_an_answer_that_utf8_cannot_hold_is_recorded_as_it_was(kind):
    def tokens(body: Any, i: int) -> bytes:
        return (
            b'"token_ids":[%d],"logprobs":{"content":[{"logprob":-1}]}' % i
            if body.get("return_token_ids")
            else b'"x":1'
        )

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        if not body.get("stream"):
            choice = b'{"index":0,"message":{"role":"assistant","content":%s},%s}' % (HALVES[0], tokens(body, 7))
            return web.Response(body=b'{"choices":[%s]}' % choice, content_type="application/json")
        deltas = [b'{"index":0,"delta":{"content":%s},%s}' % (half, tokens(body, i)) for i, half in enumerate(HALVES)]
        events = [b'data: {"choices":[%s]}\n\n' % delta for delta in deltas] + [b"data: [DONE]\n\n"]
        return web.Response(body=b"".join(events), content_type="text/event-stream")

    app, recorder = web.Application(), MemoryRecorder()
    app.add_routes([web.post("/v1/chat/completions", chat)])
    async with serving(app) as direct, relaying(direct, recorder, kind=kind) as proxied:
        _, _, whole = await post(proxied, CHAT)
        _, _, stream = await post(proxied, CHAT | {"stream": True})
    assert HALVES[0] in whole and all(half in stream for half in HALVES)
    assert b'token_ids":[' not in whole + stream
    assert [(end.status, end.error) for end in recorder.ends] == [("ok", None)] * 2
    said = [end.response["choices"][0]["message"]["content"] for end in recorder.ends]
    assert said == ["a\ud83d", "a\ud83d\ude00b"]
    if kind == "vllm":
        assert [end.choices[0].token_ids for end in recorder.ends] == [(7,), (0, 1)]


async def test_a_key_given_out_for_a_rollout_names_it():
    async with vllm_and_proxy() as (_, _, proxied, recorder):
        await post(proxied, CHAT, Authorization="Bearer rollout-key")
    assert recorder.starts[0].rollout.rollout_id == "of-key"


async def test_a_body_that_grows_over_the_limit_without_saying_so_is_refused():
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 1000

    async with (
        vllm_and_proxy() as (_, _, proxied, recorder),
        aiohttp.ClientSession() as http,
        http.post(f"{proxied}/v1/chat/completions", data=endless()) as response,
    ):
        assert response.status == 413
    assert recorder.starts == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
async def test_any_method_and_body_passes_through(method):
    async with (
        vllm_and_proxy() as (_, _, proxied, _),
        aiohttp.ClientSession() as http,
        http.request(method, f"{proxied}/v1/files/a%20b?x=%2F", data=b"\x00bytes") as response,
    ):
        seen = await response.json()
    assert (seen["method"], seen["path"], seen["body"]) == (method, "/v1/files/a%20b?x=/", "\x00bytes")


@pytest.mark.parametrize("scheme", ["", "http", "https"])  # the last: whoever ends TLS did not tell the server
async def test_a_redirect_to_the_upstream_itself_does_not_lead_past_the_proxy(scheme):
    """As vLLM's server answers to a slash too many, with its own address."""

    async def without_slash(request: web.Request) -> web.Response:
        to = request.url.with_path(request.path.rstrip("/"), keep_query=True)
        return web.Response(status=307, headers={"Location": str(to.with_scheme(scheme) if scheme else to.relative())})

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}/", without_slash)
    fake, recorder = FakeVllm(), MemoryRecorder()
    app.add_routes([web.post("/v1/chat/completions", fake.chat), web.get("/v1/{rest:.*}", fake.echo)])
    async with serving(app) as direct, relaying(direct, recorder) as proxied:
        root = f"{proxied}/rollouts/r"
        status, headers, _ = await post(root, CHAT, "/v1/chat/completions/")
        assert (status, headers["X-Rollout-Id"], len(recorder.ends)) == (200, "r", 1)
        async with aiohttp.ClientSession() as http, http.get(f"{root}/v1/files/a%20b/?x=%2F&y") as response:
            assert str(response.url).startswith(f"{root}/v1/files/a%20b?x=")


@pytest.mark.parametrize(
    "to", ["http://elsewhere/v1/x", "https://elsewhere/", "//elsewhere/v1/x", "y", "../y", "http://["]
)
async def test_a_redirect_to_anywhere_else_stays_as_it_is(to):
    async def moved(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": to})

    app = web.Application()
    app.add_routes([web.get("/v1/x", moved)])
    async with (
        serving(app) as direct,
        relaying(direct, MemoryRecorder()) as proxied,
        aiohttp.ClientSession() as http,
        http.get(f"{proxied}/v1/x", allow_redirects=False) as response,
    ):
        assert (response.status, response.headers["Location"]) == (302, to)


async def test_a_browser_may_ask_beforehand_without_a_key_and_spends_none():
    asks = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST", "Authorization": "Bearer wrong"}
    async with vllm_and_proxy(api_key="sk-of-the-upstream") as (_, _, proxied, _), aiohttp.ClientSession() as http:
        async with http.options(f"{proxied}/rollouts/r/v1/chat/completions", headers=asks) as response:
            seen = await response.json()
            assert (response.status, seen["headers"]["Origin"]) == (207, "https://app.example")
            assert "Authorization" not in seen["headers"]
        del asks["Access-Control-Request-Method"]
        for method, path in (("OPTIONS", "/v1/chat/completions"), ("POST", "/v1/embeddings")):
            async with http.request(method, proxied + path, headers=asks) as response:
                assert response.status == 401
        asks |= {"Access-Control-Request-Method": "POST"}
        async with http.options(f"{proxied}/v1/load_lora_adapter", headers=asks) as response:
            assert response.status == 404


async def test_the_alias_can_be_looked_up():
    async with (
        vllm_and_proxy() as (_, _, proxied, _),
        aiohttp.ClientSession() as http,
        http.get(f"{proxied}/v1/models/policy") as response,
    ):
        assert (await response.json())["id"] == "policy"
