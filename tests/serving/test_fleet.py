"""Several vLLM servers of the policy, as replicas and behind a router: every one serves what is live, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

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
async def replicated(start: Any, tmp_path: Path, publish: str) -> AsyncIterator[tuple[Any, Any, int]]:
    """A proxy before two policy servers: the system, the second server, not yet started, and its port."""
    port = free_port()
    async with start(publish=publish, replicas=[f"http://127.0.0.1:{port}/v1"]) as system:
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


def swap_of(system: Any, store: Any, session: Any, servers: int) -> Swap:
    """A publisher that reaches the first servers."""
    fleet = VllmFleet(session, system.config.upstreams[0].urls[:servers])
    return Swap(store, fleet, "merged", system.config.policy.directory)


async def promote(system: Any, directory: Path) -> int:
    """Make a version live that was so once."""
    async with system.store() as store:
        version: int = await system.earlier_version(store, directory)
    await system.post("/policy/promote", {"version": version})
    return version


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_version_goes_live_on_every_replica_and_one_that_missed_it_answers_nobody_until_it_is_in_line(
    start: Any, tmp_path: Path, publish: str
) -> None:
    async def promoted(system: Any) -> set[tuple[int, str]]:
        """What is answered by a new version."""
        version = await promote(system, tmp_path)
        merged, lora = f"by base with v{version}", f"by policy-v{version} with {tmp_path.name}"
        return {(200, merged if publish == "merged" else lora)}

    new = [f"new{i}" for i in range(30)]
    async with replicated(start, tmp_path, publish) as (system, second, port):
        await second_is(system, is_down=True)
        served = await promoted(system)
        assert await answers(system) == served
        async with listening(second.app, port):
            assert await answers_until(system, lambda: second.requests) == served
            assert await system.get("/readyz") == {"status": "ready", "store": "ok", "upstream": "ok"}
            system.vllm.requests.clear()
            second.requests.clear()
            served = await promoted(system)
            assert await answers(system, new) == served
            assert system.vllm.requests and second.requests
            assert (system.vllm.paused, second.paused) == (False, False)
        await second_is(system, is_down=True)
        assert await answers(system, new) == served


async def test_a_replica_that_restarts_gets_the_versions_of_running_rollouts_too(start: Any, tmp_path: Path) -> None:
    async with replicated(start, tmp_path, "lora") as (system, second, port):
        async with listening(second.app, port):
            await second_is(system, is_down=False)
            async with system.store() as store:
                versions = [await system.earlier_version(store, tmp_path) for _ in range(3)]
            for version, rollout in zip(versions, ("old", "kept", "new"), strict=True):
                await system.post("/policy/promote", {"version": version})
                assert (await system.chat(rollout))[0] == 200
            await system.call("POST", "/rollouts/old/end", {"status": "completed"})
        await second_is(system, is_down=True)
        again = PlayedVllm(tmp_path)
        async with listening(again.app, port):
            seen = await answers_until(system, lambda: again.requests, "kept")
            assert set(again.adapters) == {"policy-v2", "policy-v3"}, "none for a rollout that has ended"
            assert seen == {(200, f"by policy-v{version} with {tmp_path.name}") for version in (2, 3)}


async def test_what_one_replica_refuses_goes_live_nowhere_and_one_that_was_not_reached_answers_with_no_old_weights(
    start: Any, tmp_path: Path
) -> None:
    async with replicated(start, tmp_path, "merged") as (system, second, port), listening(second.app, port):
        await second_is(system, is_down=False)
        before = await answers(system)
        assert len(before) == 1
        async with system.store() as store, operator_session() as session:
            version = await system.earlier_version(store, tmp_path)
            second.refuses = {"/collective_rpc": 500}
            status, answer = await system.call("POST", "/policy/promote", {"version": version})
            assert (status, "collective_rpc" in answer["error"]["message"]) == (502, True)
            second.refuses = {}
            async with asyncio.timeout(60):
                while system.vllm.paused or second.paused:
                    await asyncio.sleep(0.02)
            assert await answers(system) == before
            await swap_of(system, store, session, 1).activate(await store.versions.get(version))
            assert second.weights == str(tmp_path), "only the publisher did not reach it"
            assert await answers(system) == {(200, f"by base with v{version}")}
            assert second.weights == system.vllm.weights


@pytest.mark.parametrize("servers", [1, 2])
async def test_calls_go_on_however_long_all_servers_take_to_load_new_weights(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
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
            system = await stack.enter_async_context(start(publish="merged"))
        else:
            system, second, port = await stack.enter_async_context(replicated(start, tmp_path, "merged"))
            await stack.enter_async_context(listening(second.app, port))
            await second_is(system, is_down=False)
        await system.chat("r")
        monkeypatch.setattr(VllmServer, "load_weights", slow)
        promoting = asyncio.create_task(promote(system, tmp_path))
        while not promoting.done():
            seen.add((await system.chat("r"))[0])
        await promoting
        assert seen == {200}


async def test_agents_are_answered_by_verified_weights_while_others_are_being_verified(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.serving.swap.LEAVE_S", 2.5)
    async with replicated(start, tmp_path, "merged") as (system, second, port), listening(second.app, port):
        await second_is(system, is_down=False)
        async with system.store() as store, operator_session() as session:
            version = await store.versions.get(await system.earlier_version(store, tmp_path))
            old, new = (200, f"by base with {tmp_path.name}"), (200, f"by base with v{version.version}")
            checked: list[set[tuple[int, str]]] = []

            async def check(server: VllmServer) -> None:
                asked = second if str(port) in server.base_url else system.vllm
                before = len(asked.requests)
                checked.append(await answers(system))
                assert len(asked.requests) == before, "a server is asked while its weights are not verified"

            calls = asyncio.create_task(answers_until(system, lambda: len(checked) == 2))
            await swap_of(system, store, session, 2).roll(version, 1, expected=0, check=check)
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
    """Sends each session to one server of those that are there."""

    def __init__(self, server: PlayedVllm) -> None:
        self.servers = [server]
        self.sessions: dict[str, list[PlayedVllm]] = {}  # which answered, by the header
        self.said: Any = None  # a 404, in place of an answer

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        name = request.headers.get("X-Session-Id", "none")
        server = self.servers[sum(name.encode()) % len(self.servers)]
        self.sessions.setdefault(name, []).append(server)
        return web.json_response(self.said, status=404) if self.said else await server._chat(request)


@asynccontextmanager
async def routed(start: Any, tmp_path: Path) -> AsyncIterator[tuple[Any, Router, int]]:
    """A proxy before a router before a server; the port of another, which does not run yet."""
    server, first, later = PlayedVllm(tmp_path), free_port(), free_port()
    async with listening(server.app, first):
        urls = [f"http://127.0.0.1:{port}/v1" for port in (first, later)]
        async with start(publish="lora", behind=urls) as system:
            system.vllm.odd = router = Router(server)
            yield system, router, later


async def test_behind_a_router_a_server_that_joins_gets_the_version_no_call_fails_and_a_rollout_keeps_to_one(
    start: Any, tmp_path: Path
) -> None:
    own = {"X_Session_Id": "the agent's own"}
    async with routed(start, tmp_path) as (system, router, port):
        version = await promote(system, tmp_path)
        served = {(200, f"by policy-v{version} with {tmp_path.name}")}
        assert await answers(system, **own) == served
        assert "policy, server 3 of 3" in (await system.call("GET", "/readyz"))[1]["down"]
        for _ in range(2):  # the same server, started again, has forgotten everything
            joins = PlayedVllm(tmp_path)
            async with listening(joins.app, port):
                router.servers[1:] = [joins]
                seen = await answers_until(system, lambda joins=joins: joins.adapters and joins.requests, **own)
                assert (seen, set(joins.adapters)) == (served, {f"policy-v{version}"})
                router.sessions.clear()
                for _ in range(2):
                    assert await answers(system, **own) == served
                assert router.sessions.keys() == set(ROLLOUTS)
                assert {len(set(servers)) for servers in router.sessions.values()} == {1}
                assert len({servers[0] for servers in router.sessions.values()}) == 2
                router.servers.pop()
        assert system.vllm.adapters == {}, "the router is no model server"


async def test_what_is_not_found_behind_a_router_is_waited_for_only_if_it_is_a_version_of_the_policy(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "JOIN_S", 0.01)
    async with routed(start, tmp_path) as (system, router, _):
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
    router = {"name": "policy", "base_url": "http://a/v1", "servers": ["http://c/v1"]}
    for publish in ("auto", "merged"):
        with pytest.raises(ValidationError, match=r"servers behind a router need policy\.publish lora"):
            Config.model_validate({"upstreams": [router], "policy": {"publish": publish}})
    for key, value, told in (
        ("replicas", ["http://b/v1"], "no replicas"),
        ("kind", "openai", "need kind vllm"),
        ("servers", ["http://c/v1", "http://c/v1/"], "servers must differ"),
        ("servers", ["http://c"], "servers of a vLLM server must have a path"),
        ("session_header", "no header", "session_header"),
    ):
        with pytest.raises(ValidationError, match=told):
            Config.model_validate({"upstreams": [router | {key: value}], "policy": {"publish": "lora"}})
