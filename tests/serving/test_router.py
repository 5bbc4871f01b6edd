"""vLLMs behind a router: calls go to its address, with the rollout's id, and weights to every server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import ValidationError

from lightning_proxy.core.config.root import Config
from lightning_proxy.proxy.gateway import attempts

ROLLOUTS = [f"r{i}" for i in range(20)]


class Router:
    """Sends each session to one server; sessions of a server that is away to the other."""

    def __init__(self, urls: list[str], session: aiohttp.ClientSession) -> None:
        self.urls, self._session = urls, session
        self.sessions: dict[str, list[str]] = {}  # the servers that answered, by the header

    async def __call__(self, request: web.Request) -> web.Response:
        name, body = request.headers.get("X-Session-Id", "none"), await request.read()
        first = sum(name.encode()) % len(self.urls)
        for url in (self.urls[first], self.urls[1 - first]):
            try:
                async with self._session.post(url + "/chat/completions", data=body) as answer:
                    self.sessions.setdefault(name, []).append(url)
                    return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            except aiohttp.ClientConnectorError:
                continue
        return web.Response(status=503)


@asynccontextmanager
async def serving(played: Any, port: int = 0) -> AsyncIterator[int]:
    runner = web.AppRunner(played.app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@asynccontextmanager
async def routed(running: Any, tmp_path: Path) -> AsyncIterator[tuple[Any, Router, list[Any], list[int]]]:
    """A proxy before a router before two servers, of which only the first runs."""
    policy_server = type((await _any_system(running, tmp_path)).vllm)
    servers = [policy_server(tmp_path), policy_server(tmp_path)]
    async with serving(servers[1]) as later:
        pass
    async with serving(servers[0]) as first, aiohttp.ClientSession() as session:
        urls = [f"http://127.0.0.1:{port}/v1" for port in (first, later)]
        async with running(tmp_path, publish="lora", behind=urls) as system:
            system.vllm.odd = router = Router(urls, session)
            yield system, router, servers, [first, later]


async def _any_system(running: Any, tmp_path: Path) -> Any:
    (tmp_path / "other").mkdir()
    async with running(tmp_path / "other") as system:
        return system


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def answers(system: Any) -> set[tuple[int, str]]:
    found = [await system.chat(rollout, X_Session_Id="the agent's own") for rollout in ROLLOUTS]
    return {(status, answer["choices"][0]["message"]["content"] if status == 200 else "") for status, answer in found}


async def test_a_version_goes_to_every_server_and_a_rollout_keeps_to_one(running: Any, tmp_path: Path) -> None:
    async with routed(running, tmp_path) as (system, router, servers, ports), serving(servers[1], ports[1]):
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        status, _ = await system.call("POST", "/policy/promote", {"version": version})
        assert status == 200
        assert await answers(system) == {(200, f"by policy-v{version} with {tmp_path.name}")}
        assert await answers(system) == {(200, f"by policy-v{version} with {tmp_path.name}")}
        assert [set(server.adapters) for server in servers] == [{f"policy-v{version}"}] * 2
        assert system.vllm.adapters == {}, "the router is no model server"
        assert router.sessions.keys() == set(ROLLOUTS)
        assert {len(set(urls)) for urls in router.sessions.values()} == {1}
        assert len({urls[0] for urls in router.sessions.values()}) == 2


async def test_a_server_that_joins_later_gets_the_version_and_no_call_fails_meanwhile(
    running: Any, tmp_path: Path
) -> None:
    async with routed(running, tmp_path) as (system, _, servers, ports):
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
        served = {(200, f"by policy-v{version} with {tmp_path.name}")}
        assert await answers(system) == served
        assert "policy, server 3 of 3" in (await system.call("GET", "/readyz"))[1]["down"]
        async with serving(servers[1], ports[1]):
            seen: set[tuple[int, str]] = set()
            while not servers[1].adapters or servers[1].requests == []:
                seen |= await answers(system)
            assert seen == served
            await until(lambda: set(servers[1].adapters) == {f"policy-v{version}"})
        again = type(servers[1])(tmp_path)  # it has forgotten everything
        async with serving(again, ports[1]):
            assert await answers(system) == served
            await until(lambda: set(again.adapters) == {f"policy-v{version}"})


async def test_a_model_that_nobody_has_is_still_not_found(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "JOIN_S", 0.01)
    async with routed(running, tmp_path) as (system, router, _, _):
        body = {"model": "nobody", "messages": []}
        status, answer = await system.call("POST", "/rollouts/r/v1/chat/completions", body)
        assert (status, "nobody" in answer["error"]["message"]) == (404, True)
        assert len(router.sessions["r"]) == 1, "only a version of the policy is waited for"
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200

        asked = 0

        async def without_adapters(request: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            model = (await request.json())["model"]
            return web.json_response({"error": {"message": f"The model `{model}` does not exist."}}, status=404)

        system.vllm.odd = without_adapters
        assert (await system.chat("s"))[0] == 404
        assert asked == 1 + attempts.JOIN_TRIES


async def test_what_else_is_not_found_behind_a_router_is_asked_for_once(running: Any, tmp_path: Path) -> None:
    async with routed(running, tmp_path) as (system, _, _, _):
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
        asked = 0

        async def without_route(_: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            return web.json_response({"detail": "Not Found"}, status=404)

        system.vllm.odd = without_route
        status, answer = await system.chat("s")
        assert (status, answer, asked) == (404, {"detail": "Not Found"}, 1)


def test_a_router_that_cannot_work_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "merged", "servers behind a router need policy.publish lora"),
        ({}, "auto", "servers behind a router need policy.publish lora"),
        ({"replicas": ["http://b/v1"]}, "lora", "there are no replicas"),
        ({"kind": "openai"}, "lora", "kind is vllm"),
        ({"servers": ["http://c/v1", "http://c/v1/"]}, "lora", "servers must differ"),
        ({"servers": ["http://c"]}, "lora", "servers of a vLLM must have a path"),
        ({"session_header": "no header"}, "lora", "session_header"),
    ]
    for upstream, publish, told in cases:
        one = {"name": "policy", "base_url": "http://a/v1", "servers": ["http://c/v1"]} | upstream
        with pytest.raises(ValidationError, match=told):
            Config.model_validate({"upstreams": [one], "policy": {"publish": publish}})
