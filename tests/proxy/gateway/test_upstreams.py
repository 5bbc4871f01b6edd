"""Fallbacks, replicas and health checks: a real proxy before servers that answer, refuse, hang and come back."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from support.in_process import proxy_of
from support.sections import PolicyConfig

SAY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Server:
    """A model server with a name; `status` of its answers, or how it fails; what it was asked."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name, self.port = name, port
        self.status = 200
        self.behaviour = "answers"
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/{rest:.*}", self.answer)
        app.router.add_get("/v1/{rest:.*}", self.again)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]
        yield self
        await runner.cleanup()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []}, status=self.status)

    async def again(self, _: web.Request) -> web.Response:
        return web.json_response({"by": self.name})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await (_form(request) if request.content_type == "multipart/form-data" else request.json())
        self.bodies.append(body)
        if self.behaviour == "hangs":
            await asyncio.sleep(60)
        if self.status != 200:
            return web.json_response({"error": {"message": f"by {self.name}"}}, status=self.status)
        if body.get("stream"):
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            await answer.write(b'data: {"choices": [{"index": 0, "delta": {"content": "by "}}]}\n\n')
            if self.behaviour == "breaks":
                request.transport.close()  # type: ignore[union-attr]
            await answer.write(b"data: [DONE]\n\n")
            return answer
        message = {"role": "assistant", "content": f"by {self.name}"}
        answer_id = f"by_{self.name}_{len(self.bodies)}"
        choices = [{"index": 0, "message": message}]
        return web.json_response({"id": answer_id, "model": body["model"], "choices": choices})


async def _form(request: web.Request) -> dict[str, Any]:
    fields = await request.post()
    return {name: value.file.read() if isinstance(value, web.FileField) else value for name, value in fields.items()}


class Proxy:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def ask(self, rollout: str = "r", path: str = "chat/completions", **more: Any) -> tuple[int, Any, bytes]:
        url = f"{self.url}/rollouts/{rollout}/v1/{path}"
        async with self.session.post(url, json=SAY | more) as answer:
            return answer.status, answer.headers, await answer.read()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            text = await answer.text()
            return json.loads(text) if text.startswith("{") else text

    async def calls(self, rollout: str = "r") -> list[dict[str, Any]]:
        return (await self.get(f"/rollouts/{rollout}"))["calls"]

    async def ready_when(self, down: list[str]) -> None:
        """Wait until /readyz names these as down."""
        while (await self.get("/readyz")).get("down", []) != down:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def proxying(tmp_path: Path, *upstreams: UpstreamConfig) -> AsyncIterator[Proxy]:
    config = Config(
        store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
        upstreams=list(upstreams),
        policy=PolicyConfig(publish="merged", directory=tmp_path / "policy"),
    )
    async with proxy_of(config) as url, aiohttp.ClientSession() as session:
        yield Proxy(url, session)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def upstream(name: str, *servers: Server, **settings: Any) -> UpstreamConfig:
    settings.setdefault("kind", "openai")
    first, *others = (server.url for server in servers)
    return UpstreamConfig(name=name, base_url=first, replicas=others, **settings)


async def test_a_server_may_answer_below_any_path_and_want_a_query_of_its_own(tmp_path: Path) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    root = f"http://127.0.0.1:{runner.addresses[0][1]}"
    azure = UpstreamConfig(name="azure", kind="openai", base_url=f"{root}/openai/deployments/d/?api-version=2024-10-21")
    gemini = UpstreamConfig(name="gemini", kind="openai", base_url=f"{root}/v1beta/openai/", models=["g"])
    async with proxying(tmp_path, azure, gemini) as proxy:
        assert (await proxy.ask())[0] == (await proxy.ask(model="g"))[0] == 200
        assert (await proxy.ask(path="chat/completions?a=b"))[0] == 200
    version = "api-version=2024-10-21"
    assert asked == [
        f"/openai/deployments/d/chat/completions?{version}", "/v1beta/openai/chat/completions",
        f"/openai/deployments/d/chat/completions?{version}&a=b",
    ]  # fmt: skip
    await runner.cleanup()


@pytest.mark.parametrize("failure", [429, 500, 503, "hangs", "away"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fallback_answers_for_an_upstream_that_fails(tmp_path: Path, failure: Any, stream: bool) -> None:
    async with Server("first").running() as first, Server("second").running() as second:
        first.status = failure if isinstance(failure, int) else 200
        first.behaviour = str(failure)
        asked = first if failure != "away" else Server("gone", free_port())
        one = upstream("one", asked, fallbacks=["two"], first_byte_timeout_s=0.3)
        async with proxying(tmp_path, one, upstream("two", second, model_map={"m": "other"})) as proxy:
            status, _, raw = await proxy.ask(stream=stream)
            [call] = await proxy.calls()
    assert (status, b"by " in raw) == (200, True)
    assert [body["model"] for body in second.bodies] == ["other"]
    assert len(first.bodies) == (failure != "away")
    assert (call["status"], call["upstream"], call["model"], call["http_status"]) == ("ok", "two", "other", 200)


async def test_without_a_failure_no_fallback_is_asked(tmp_path: Path) -> None:
    async with Server("first").running() as first, Server("second").running() as second:
        one = upstream("one", first, fallbacks=["two"])
        async with proxying(tmp_path, one, upstream("two", second)) as proxy:
            for status in (200, 400, 404):
                first.status = status
                assert (await proxy.ask())[0] == status
            assert {call["upstream"] for call in await proxy.calls()} == {"one"}
    assert second.bodies == []


async def test_the_last_failure_is_shown_where_all_fail_and_retries_come_first(tmp_path: Path) -> None:
    async with Server("first").running() as first, Server("second").running() as second:
        first.status, second.status = 503, 429
        one = upstream("one", first, fallbacks=["two"], retries=2, retry_wait_s=0.01)
        async with proxying(tmp_path, one, upstream("two", second)) as proxy:
            status, _, raw = await proxy.ask()
            [call] = await proxy.calls()
    assert (status, b"by second" in raw) == (429, True)
    assert (len(first.bodies), len(second.bodies)) == (3, 1)
    assert (call["status"], call["upstream"], call["http_status"]) == ("error", "two", 429)


async def test_a_stream_that_has_begun_is_never_begun_again_elsewhere(tmp_path: Path) -> None:
    async with Server("first").running() as first, Server("second").running() as second:
        first.behaviour = "breaks"
        one = upstream("one", first, fallbacks=["two"])
        async with proxying(tmp_path, one, upstream("two", second)) as proxy:
            with pytest.raises(aiohttp.ClientPayloadError):
                await proxy.ask(stream=True)
            [call] = await proxy.calls()
    assert (second.bodies, call["status"], call["upstream"]) == ([], "error", "one")


async def test_unrecorded_requests_fall_back_too_and_fallbacks_have_fallbacks(tmp_path: Path) -> None:
    gone = [upstream(name, Server(name, free_port()), fallbacks=[after]) for name, after in ("ab", "bc")]
    async with Server("third").running() as third, proxying(tmp_path, *gone, upstream("c", third)) as proxy:
        status, _, raw = await proxy.ask(path="embeddings")
    assert (status, b"by third" in raw) == (200, True)


@pytest.mark.parametrize("first", ["gone", "litellm"])
async def test_a_fallback_that_has_no_such_api_is_passed_over(tmp_path: Path, first: str) -> None:
    async with Server("last").running() as last:
        gone = upstream("gone", Server("gone", free_port()), fallbacks=["litellm"])
        litellm = UpstreamConfig(name="litellm", kind="litellm", model_map={"m": "gemini/m"}, fallbacks=["last"])
        upstreams = [gone, litellm] if first == "gone" else [litellm, gone]
        async with proxying(tmp_path, *upstreams, upstream("last", last)) as proxy:
            status, _, raw = await proxy.ask(path="moderations")
    assert (status, b"by last" in raw) == (200, True)


async def test_a_fallback_that_has_no_name_for_the_alias_makes_nothing_ready(tmp_path: Path) -> None:
    vllm = upstream("policy", Server("gone", free_port()), kind="vllm", fallbacks=["litellm"])
    litellm = UpstreamConfig(name="litellm", kind="litellm", models=["gemini/m"])
    async with proxying(tmp_path, vllm, litellm) as proxy:
        assert (await proxy.ask(model="policy"))[0] == 502
        assert (await proxy.get("/readyz"))["status"] == "not ready"


@pytest.mark.parametrize("more", [{"kind": "openai"}, {"kind": "litellm", "models": ["openai/m"]}])
async def test_it_is_not_ready_while_the_only_upstream_is_down(tmp_path: Path, more: dict[str, Any]) -> None:
    server = Server("only", free_port())
    async with proxying(tmp_path, upstream("only", server, **more)) as proxy:

        async def turns(status: int, upstream: str) -> None:
            async with asyncio.timeout(20):  # an answer is kept for a second
                while True:
                    async with proxy.session.get(f"{proxy.url}/readyz") as answer:
                        found = await answer.json()
                    assert str(server.port) not in found["upstream"]
                    if answer.status == status:
                        break
                    await asyncio.sleep(0.05)
            assert upstream in found["upstream"]

        await turns(503, "not reachable")
        async with server.running():
            await turns(200, "ok")
            server.status = 500
            await turns(503, "HTTP 500")
            server.status = 401  # it wants an agent's key
            await turns(200, "ok")


async def test_it_is_ready_while_a_fallback_answers_and_not_once_that_is_down_too(tmp_path: Path) -> None:
    second = Server("second")
    async with second.running():
        first = upstream("first", Server("gone", free_port()), fallbacks=["second"])
        async with proxying(tmp_path, first, upstream("second", second)) as proxy:
            assert (await proxy.get("/readyz"))["status"] == "degraded"
            second.status = 502
            async with asyncio.timeout(20):
                while (await proxy.get("/readyz"))["status"] != "not ready":
                    await asyncio.sleep(0.05)


async def test_what_a_fallback_of_the_policy_answers_is_no_policy_version(tmp_path: Path) -> None:
    async with Server("second").running() as second:
        vllm = upstream("policy", Server("gone", free_port()), kind="vllm", fallbacks=["two"])
        async with proxying(tmp_path, vllm, upstream("two", second, model_map={"policy": "gpt"})) as proxy:
            status, headers, _ = await proxy.ask(model="policy")
            [call] = await proxy.calls()
            ready = await proxy.get("/readyz")
    assert (ready["status"], ready["upstream"]) == ("degraded", "not reachable"), "a call is answered"
    assert (status, "X-Policy-Version" in headers) == (200, False)
    assert "return_token_ids" not in second.bodies[0]
    assert (call["upstream"], call["model"], call["policy_version"], call["policy_versions"]) == (
        "two",
        "gpt",
        None,
        [],
    )
    assert call["trainable"] is False


async def test_a_policy_that_fails_under_way_gives_up_its_version_in_answer_and_record(
    tmp_path: Path, running: Any
) -> None:
    async with Server("second").running() as second:
        two = upstream("two", second, model_map={"policy": "gpt"})
        async with running(tmp_path, fallbacks=["two"], others=[two]) as system:
            status, _ = await system.chat("r")
            [call] = (await system.call("GET", "/rollouts/r"))[1]["calls"]
            assert (status, call["policy_version"], call["upstream"]) == (200, 0, "policy")
            system.vllm.fails = 503
            url = f"{system.url}/rollouts/r/v1/chat/completions"
            async with system.session.post(url, json=SAY | {"model": "policy"}) as answer:
                assert (answer.status, "X-Policy-Version" in answer.headers) == (200, False)
            _, call = (await system.call("GET", "/rollouts/r"))[1]["calls"]
    assert (call["policy_version"], call["policy_versions"], call["upstream"]) == (None, [], "two")
    assert (call["model"], call["untrainable_reason"]) == ("gpt", "the model is not the policy")


async def test_rollouts_keep_to_a_replica_and_only_those_of_a_dead_one_move(tmp_path: Path) -> None:
    c = Server("c", free_port())
    async with (
        Server("a").running() as a,
        Server("b").running() as b,
        proxying(tmp_path, upstream("one", a, b, c)) as proxy,
    ):
        async with c.running():
            placed = await placement(proxy)
            assert set(placed.values()) == {"a", "b", "c"}
            assert await placement(proxy) == placed
        moved = await placement(proxy)
        assert set(moved.values()) == {"a", "b"}
        assert all(moved[rollout] == name for rollout, name in placed.items() if name != "c")


async def placement(proxy: Proxy) -> dict[str, str]:
    """Which replica answers which of 40 rollouts."""
    found = {}
    for i in range(40):
        _, _, raw = await proxy.ask(f"r{i}")
        found[f"r{i}"] = json.loads(raw)["choices"][0]["message"]["content"].removeprefix("by ")
    return found


async def test_a_replica_that_answers_with_an_error_is_not_followed_by_another(tmp_path: Path) -> None:
    async with Server("a").running() as a, Server("b").running() as b:
        a.status = b.status = 500
        async with proxying(tmp_path, upstream("one", a, b)) as proxy:
            assert (await proxy.ask())[0] == 500
    assert len(a.bodies) + len(b.bodies) == 1


async def test_a_health_check_takes_a_replica_out_and_puts_it_back(tmp_path: Path) -> None:
    async with Server("a").running() as a, Server("b").running() as b:
        name = "one, server 1 of 2"
        metric = f'lightning_upstream_up{{replica="127.0.0.1:{a.port}",upstream="one"}}'
        async with proxying(tmp_path, upstream("one", a, b, health_check_s=0.05)) as proxy:
            await proxy.ready_when([])
            placed = await placement(proxy)
            assert set(placed.values()) == {"a", "b"}
            a.status = 503
            await proxy.ready_when([name])
            assert f"{metric} 0.0" in await proxy.get("/metrics")
            assert set((await placement(proxy)).values()) == {"b"}
            a.status = 200
            await proxy.ready_when([])
            assert f"{metric} 1.0" in await proxy.get("/metrics")
            assert await placement(proxy) == placed


async def test_an_upstream_that_is_known_to_be_down_is_not_waited_for(tmp_path: Path) -> None:
    async with Server("first").running() as first, Server("second").running() as second:
        first.status, first.behaviour = 500, "hangs"
        one = upstream("one", first, fallbacks=["two"], health_check_s=0.05)
        async with proxying(tmp_path, one, upstream("two", second)) as proxy:
            await proxy.ready_when(["one"])
            assert (await proxy.ask())[0] == 200
    assert (first.bodies, len(second.bodies)) == ([], 1)


async def test_a_model_goes_to_the_upstream_that_names_it_and_what_a_fallback_maps_does_not(tmp_path: Path) -> None:
    async with Server("first").running() as first, Server("second").running() as second:
        one = upstream("one", first, fallbacks=["two"])
        two = upstream("two", second, models=["direct"], model_map={"m": "renamed"})
        three = upstream("three", second, model_map={"mapped": "other"})
        async with proxying(tmp_path, one, two, three) as proxy:
            for model in ("m", "unknown", "direct", "mapped"):
                await proxy.ask(model=model)
            calls = await proxy.calls()
    assert [(call["upstream"], call["model"]) for call in calls] == [
        ("one", "m"),
        ("one", "unknown"),
        ("two", "direct"),
        ("three", "other"),
    ]


async def test_a_form_goes_to_the_upstream_of_the_model_that_it_names(tmp_path: Path) -> None:
    sound = b"\x00\r\n--\xff" * 9
    async with Server("first").running() as first, Server("second").running() as second:
        two = upstream("two", second, models=["whisper-1"], model_map={"fast": "other"})
        async with proxying(tmp_path, upstream("one", first), two) as proxy:
            for model in ("m", "whisper-1", "fast"):
                form = aiohttp.FormData({"language": "en"})
                form.add_field("file", sound, filename="a.wav", content_type="audio/wav")
                form.add_field("model", model)
                async with proxy.session.post(f"{proxy.url}/v1/audio/transcriptions", data=form) as answer:
                    assert answer.status == 200
    assert first.bodies == [{"language": "en", "file": sound, "model": "m"}]
    assert second.bodies == [{"language": "en", "file": sound, "model": model} for model in ("whisper-1", "other")]


async def test_a_response_is_asked_for_again_where_it_was_given(tmp_path: Path) -> None:
    servers = (Server(name).running() for name in ("first", "twin", "other"))
    async with next(servers) as first, next(servers) as twin, next(servers) as other:
        one, two = upstream("one", first, twin), upstream("two", other, models=["theirs"])
        async with proxying(tmp_path, one, two) as proxy:
            for prefix in ("/rollouts/r/v1", "/v1"):
                for model in ("theirs", *["m"] * 6):
                    async with proxy.session.post(f"{proxy.url}{prefix}/responses", json={"model": model}) as answer:
                        given = (await answer.json())["id"]
                    by = await proxy.get(f"{prefix}/responses/{given}/input_items")
                    assert given.startswith(f"by_{by['by']}_")
            assert (await proxy.get("/rollouts/r/v1/responses/unknown"))["by"] in ("first", "twin")
