"""Several vLLM servers of the policy, as replicas and behind a router: every one serves what is live, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import ValidationError

from contract.system import free_port, listening
from contract.vllm import PlayedVllm
from lightning_proxy.core.config.root import Config
from lightning_proxy.proxy.gateway import attempts
from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import LOADING, VllmFleet, VllmServer, operator_session

ROLLOUTS = [f"r{i}" for i in range(30)]


@asynccontextmanager
async def replicated(running: Any, tmp_path: Path, publish: str) -> AsyncIterator[tuple[Any, Any, int]]:
    """A proxy before two policy servers: the system, the second server, not yet started, and its port."""
    port = free_port()
    async with running(tmp_path, publish=publish, replicas=[f"http://127.0.0.1:{port}/v1"]) as system:
        yield system, PlayedVllm(tmp_path), port


async def second_is(system: Any, *, is_down: bool) -> None:
    """Wait until the proxy knows it."""
    async with asyncio.timeout(20):
        while ("policy, server 2 of 2" in (await system.call("GET", "/readyz"))[1].get("down", [])) != is_down:
            await asyncio.sleep(0.02)


async def answers(system: Any, rollouts: list[str] = ROLLOUTS, **headers: str) -> set[tuple[int, str]]:
    """Status and text of a call of each rollout."""
    found = [await system.chat(rollout, **headers) for rollout in rollouts]
    return {(status, answer["choices"][0]["message"]["content"] if status == 200 else "") for status, answer in found}


async def answers_until(system: Any, done: Callable[[], Any], *rollouts: str, **headers: str) -> set[tuple[int, str]]:
    """What is answered, to these rollouts too, until it is done."""
    seen = set[tuple[int, str]]()
    async with asyncio.timeout(20):
        while not done():
            seen |= await answers(system, [*rollouts, *ROLLOUTS], **headers)
    return seen


async def promote(system: Any, directory: Path) -> int:
    """Make a version live that was so once."""
    async with system.store() as store:
        version: int = await system.earlier_version(store, directory)
    assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
    return version


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_version_goes_live_on_every_replica_and_one_that_missed_it_answers_nobody_until_it_is_in_line(
    running: Any, tmp_path: Path, publish: str
) -> None:
    async def promoted(system: Any) -> str:
        """What is said by a new version."""
        version = await promote(system, tmp_path)
        return f"by base with v{version}" if publish == "merged" else f"by policy-v{version} with {tmp_path.name}"

    async with replicated(running, tmp_path, publish) as (system, second, port):
        await second_is(system, is_down=True)
        served = await promoted(system)
        assert await answers(system) == {(200, served)}
        async with listening(second.app, port):
            assert await answers_until(system, lambda: second.requests) == {(200, served)}
            assert (await system.call("GET", "/readyz"))[1] == {"status": "ready", "store": "ok", "upstream": "ok"}
            for server in (system.vllm, second):
                server.requests.clear()
            served = await promoted(system)
            assert await answers(system, [f"new{i}" for i in range(30)]) == {(200, served)}
            assert system.vllm.requests and second.requests
            assert (system.vllm.paused, second.paused) == (False, False)
        await second_is(system, is_down=True)
        assert await answers(system, [f"new{i}" for i in range(30)]) == {(200, served)}


async def test_a_replica_that_restarts_gets_the_versions_of_running_rollouts_too(running: Any, tmp_path: Path) -> None:
    async with replicated(running, tmp_path, "lora") as (system, second, port):
        async with listening(second.app, port):
            await second_is(system, is_down=False)
            async with system.store() as store:
                versions = [await system.earlier_version(store, tmp_path) for _ in range(3)]
            for version, rollout in zip(versions, ("old", "kept", "new"), strict=True):
                assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
                assert (await system.chat(rollout))[0] == 200
            await system.call("POST", "/rollouts/old/end", {"status": "completed"})
        await second_is(system, is_down=True)
        again = PlayedVllm(tmp_path)
        async with listening(again.app, port):
            seen = await answers_until(system, lambda: again.requests, "kept")
            assert set(again.adapters) == {"policy-v2", "policy-v3"}, "none for a rollout that has ended"
            assert seen == {(200, f"by policy-v{version} with {tmp_path.name}") for version in (2, 3)}


async def test_what_one_replica_refuses_goes_live_nowhere_and_one_that_was_not_reached_answers_with_no_old_weights(
    running: Any, tmp_path: Path
) -> None:
    async with replicated(running, tmp_path, "merged") as (system, second, port), listening(second.app, port):
        await second_is(system, is_down=False)
        before = await answers(system)
        assert len(before) == 1
        async with system.store() as store, operator_session() as session:
            version = await system.earlier_version(store, tmp_path)
            second.refuses = {"/collective_rpc": 500}
            status, answer = await system.call("POST", "/policy/promote", {"version": version})
            assert (status, "collective_rpc" in answer["error"]["message"]) == (502, True)
            assert (await system.call("GET", "/policy"))[1]["live_version"] == 0
            second.refuses = {}
            async with asyncio.timeout(20):
                while system.vllm.paused or second.paused:
                    await asyncio.sleep(0.02)
            assert await answers(system) == before
            alone = VllmFleet(session, system.config.upstreams[0].urls[:1])
            swap = Swap(store, alone, "merged", system.config.policy.directory)
            await swap.activate(await store.versions.get(version))
            assert second.weights == str(tmp_path), "only the publisher did not reach it"
            assert await answers(system) == {(200, f"by base with v{version}")}
            assert second.weights == system.vllm.weights


@pytest.mark.parametrize("servers", [1, 2])
async def test_calls_go_on_however_long_all_servers_take_to_load_new_weights(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    load, seen = VllmServer.load_weights, set[int]()

    async def slow(server: VllmServer, path: str) -> None:
        await server.name_weights(LOADING)
        await asyncio.sleep(0.5)
        await load(server, path)

    monkeypatch.setattr("lightning_proxy.proxy.gateway.routing.MENDED_S", 0.01)
    monkeypatch.setattr("lightning_proxy.proxy.gateway.routing.WATCH_S", 0.02)
    async with AsyncExitStack() as stack:
        if servers == 1:
            system = await stack.enter_async_context(running(tmp_path, publish="merged"))
        else:
            system, second, port = await stack.enter_async_context(replicated(running, tmp_path, "merged"))
            await stack.enter_async_context(listening(second.app, port))
            await second_is(system, is_down=False)
        assert (await system.chat("r"))[0] == 200
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        monkeypatch.setattr(VllmServer, "load_weights", slow)
        promoting = asyncio.create_task(system.call("POST", "/policy/promote", {"version": version}))
        while not promoting.done():
            seen.add((await system.chat("r"))[0])
        assert ((await promoting)[0], seen) == (200, {200})


async def test_agents_are_answered_by_verified_weights_while_others_are_being_verified(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.serving.swap.LEAVE_S", 2.5)
    async with replicated(running, tmp_path, "merged") as (system, second, port), listening(second.app, port):
        await second_is(system, is_down=False)
        async with system.store() as store, operator_session() as session:
            version = await store.versions.get(await system.earlier_version(store, tmp_path))
            swap = Swap(
                store, VllmFleet(session, system.config.upstreams[0].urls), "merged", system.config.policy.directory
            )
            old, new = (200, f"by base with {tmp_path.name}"), (200, f"by base with v{version.version}")
            checked: list[set[tuple[int, str]]] = []

            async def check(server: VllmServer) -> None:
                asked = second if str(port) in server.base_url else system.vllm
                before = len(asked.requests)
                checked.append(await answers(system))
                assert len(asked.requests) == before, "a server is asked while its weights are not verified"

            calls = asyncio.create_task(answers_until(system, lambda: len(checked) == 2))
            await swap.roll(version, 1, expected=0, check=check)
            seen = await calls
            assert checked == [{old}, {new}]
            assert seen <= {old, new}, "no call fails, and none waits for the end"
            assert await answers(system) == {new}
            assert (await store.versions.live()).verified
            await second_is(system, is_down=False)
            assert await answers(system) == {new}
            assert second.requests and system.vllm.requests


# Behind a router


class Router:
    """Sends each session to one server; sessions of a server that is away to the other."""

    def __init__(self, urls: list[str], session: aiohttp.ClientSession) -> None:
        self.urls, self._session = urls, session
        self.sessions: dict[str, list[str]] = {}  # the servers that answered, by the header
        self.said: Any = None  # a 404, in place of an answer

    async def __call__(self, request: web.Request) -> web.Response:
        name, body = request.headers.get("X-Session-Id", "none"), await request.read()
        if self.said:
            self.sessions.setdefault(name, []).append("")
            return web.json_response(self.said, status=404)
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
async def routed(running: Any, tmp_path: Path) -> AsyncIterator[tuple[Any, Router, list[PlayedVllm], int]]:
    """A proxy before a router before two servers, of which only the first runs; the port of the other."""
    servers, first, later = [PlayedVllm(tmp_path), PlayedVllm(tmp_path)], free_port(), free_port()
    async with listening(servers[0].app, first), aiohttp.ClientSession() as session:
        urls = [f"http://127.0.0.1:{port}/v1" for port in (first, later)]
        async with running(tmp_path, publish="lora", behind=urls) as system:
            system.vllm.odd = router = Router(urls, session)
            yield system, router, servers, later


async def test_behind_a_router_a_server_that_joins_gets_the_version_no_call_fails_and_a_rollout_keeps_to_one(
    running: Any, tmp_path: Path
) -> None:
    own = {"X_Session_Id": "the agent's own"}
    async with routed(running, tmp_path) as (system, router, servers, port):
        version = await promote(system, tmp_path)
        served = {(200, f"by policy-v{version} with {tmp_path.name}")}
        assert await answers(system, **own) == served
        assert "policy, server 3 of 3" in (await system.call("GET", "/readyz"))[1]["down"]
        for joins in (servers[1], PlayedVllm(tmp_path)):  # the same server, started again, has forgotten everything
            async with listening(joins.app, port):
                seen = await answers_until(system, lambda joins=joins: joins.adapters and joins.requests, **own)
                assert (seen, set(joins.adapters)) == (served, {f"policy-v{version}"})
                router.sessions.clear()
                for _ in range(2):
                    assert await answers(system, **own) == served
                assert router.sessions.keys() == set(ROLLOUTS)
                assert {len(set(urls)) for urls in router.sessions.values()} == {1}
                assert len({urls[0] for urls in router.sessions.values()}) == 2
        assert system.vllm.adapters == {}, "the router is no model server"


async def test_what_is_not_found_behind_a_router_is_waited_for_only_if_it_is_a_version_of_the_policy(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "JOIN_S", 0.01)
    async with routed(running, tmp_path) as (system, router, _, _):
        body = {"model": "nobody", "messages": []}
        status, answer = await system.call("POST", "/rollouts/r/v1/chat/completions", body)
        assert (status, "nobody" in answer["error"]["message"]) == (404, True)
        assert len(router.sessions["r"]) == 1
        await promote(system, tmp_path)
        for said, tries in (
            ({"error": {"message": "The model `policy-v1` does not exist."}}, 1 + attempts.JOIN_TRIES),
            ({"detail": "Not Found"}, 1),
        ):
            router.said = said
            assert (await system.chat("s"))[0] == 404
            assert len(router.sessions.pop("s")) == tries


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
