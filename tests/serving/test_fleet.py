"""Several vLLM servers of the policy: every one serves what is live, or nobody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.system import listening
from lightning_proxy.core.errors import UpstreamUnreachable
from lightning_proxy.serving.swap import Swap
from lightning_proxy.serving.vllm import LOADING, VllmFleet, VllmServer, operator_session

ROLLOUTS = [f"r{i}" for i in range(30)]


@asynccontextmanager
async def replicated(running: Any, tmp_path: Path, publish: str) -> AsyncIterator[tuple[Any, Any, int]]:
    """A proxy before two policy servers: the system, the second server, not yet started, and its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    async with running(tmp_path, publish=publish, replicas=[f"http://127.0.0.1:{port}/v1"]) as system:
        yield system, type(system.vllm)(tmp_path), port


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


def down(system: Any) -> Any:
    async def is_down() -> bool:
        return "policy, server 2 of 2" in (await system.call("GET", "/readyz"))[1].get("down", [])

    return is_down


def up(system: Any, port: int) -> Any:
    async def is_up() -> bool:
        return not await down(system)()

    return is_up


async def answers(system: Any, rollouts: list[str] = ROLLOUTS) -> set[tuple[int, str]]:
    """Status and text of a call of each rollout."""
    found = [await system.chat(rollout) for rollout in rollouts]
    return {(status, answer["choices"][0]["message"]["content"] if status == 200 else "") for status, answer in found}


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_version_goes_live_on_every_replica(running: Any, tmp_path: Path, publish: str) -> None:
    async with replicated(running, tmp_path, publish) as (system, second, port), listening(second.app, port):
        await until(up(system, port))
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        status, live = await system.call("POST", "/policy/promote", {"version": version})
        assert (status, live["version"]) == (200, version)
        served = f"by base with v{version}" if publish == "merged" else f"by policy-v{version} with {tmp_path.name}"
        assert await answers(system) == {(200, served)}
        assert system.vllm.requests
        assert second.requests
        assert (system.vllm.paused, second.paused) == (False, False)


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_a_replica_that_missed_a_publication_answers_nobody_until_it_is_in_line(
    running: Any, tmp_path: Path, publish: str
) -> None:
    async with replicated(running, tmp_path, publish) as (system, second, port):
        await until(down(system))
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
        served = f"by base with v{version}" if publish == "merged" else f"by policy-v{version} with {tmp_path.name}"
        assert await answers(system) == {(200, served)}
        async with listening(second.app, port):
            seen: set[tuple[int, str]] = set()

            async def is_asked() -> bool:
                seen.update(await answers(system))
                return bool(second.requests)

            await until(is_asked)
            assert seen == {(200, served)}
            assert (await system.call("GET", "/readyz"))[1] == {"status": "ready", "store": "ok", "upstream": "ok"}
        await until(down(system))
        assert await answers(system) == {(200, served)}


async def test_a_replica_that_restarts_gets_the_versions_of_running_rollouts_too(running: Any, tmp_path: Path) -> None:
    async with replicated(running, tmp_path, "lora") as (system, second, port):
        async with listening(second.app, port):
            await until(up(system, port))
            async with system.store() as store:
                versions = [await system.earlier_version(store, tmp_path) for _ in range(3)]
            for version, rollout in zip(versions, ("old", "kept", "new"), strict=True):
                assert (await system.call("POST", "/policy/promote", {"version": version}))[0] == 200
                assert (await system.chat(rollout))[0] == 200
            await system.call("POST", "/rollouts/old/end", {"status": "completed"})
        await until(down(system))
        again = type(system.vllm)(tmp_path)
        async with listening(again.app, port):
            seen: set[tuple[int, str]] = set()

            async def is_asked() -> bool:
                seen.update(await answers(system, ["kept"]) | await answers(system))
                return bool(again.requests)

            await until(is_asked)
            assert set(again.adapters) == {"policy-v2", "policy-v3"}, "none for a rollout that has ended"
            assert seen == {(200, f"by policy-v{version} with {tmp_path.name}") for version in (2, 3)}


async def test_a_replica_that_only_the_publisher_did_not_reach_answers_with_no_old_weights(
    running: Any, tmp_path: Path
) -> None:
    async with replicated(running, tmp_path, "merged") as (system, second, port), listening(second.app, port):
        await until(up(system, port))
        assert len(await answers(system)) == 1
        async with system.store() as store, operator_session() as session:
            version = await system.earlier_version(store, tmp_path)
            alone = VllmFleet(session, system.config.upstreams[0].urls[:1])
            swap = Swap(store, alone, "merged", system.config.policy.directory)
            await swap.activate(await store.versions.get(version))
            assert second.weights == str(tmp_path)
            assert await answers(system) == {(200, f"by base with v{version}")}
            assert second.weights == system.vllm.weights


async def test_what_one_replica_refuses_goes_live_nowhere(running: Any, tmp_path: Path) -> None:
    async with replicated(running, tmp_path, "merged") as (system, second, port), listening(second.app, port):
        await until(up(system, port))
        before = await answers(system)
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        second.refuses = {"/collective_rpc": 500}
        status, answer = await system.call("POST", "/policy/promote", {"version": version})
        assert (status, "collective_rpc" in answer["error"]["message"]) == (502, True)
        assert (await system.call("GET", "/policy"))[1]["live_version"] == 0
        second.refuses = {}

        async def both_go_on() -> bool:
            return not system.vllm.paused and not second.paused

        await until(both_go_on)
        assert await answers(system) == before


@pytest.mark.parametrize("servers", [1, 2])
async def test_calls_go_on_however_long_all_servers_take_to_load_new_weights(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    load, seen = VllmServer.load_weights, set[int]()

    async def slow(server: VllmServer, path: str) -> None:
        await server.name_weights(LOADING)
        await asyncio.sleep(0.5)
        await load(server, path)

    async with contextlib.AsyncExitStack() as stack:
        if servers == 1:
            system = await stack.enter_async_context(running(tmp_path, publish="merged"))
        else:
            system, second, port = await stack.enter_async_context(replicated(running, tmp_path, "merged"))
            await stack.enter_async_context(listening(second.app, port))
            await until(up(system, port))
        assert (await system.chat("r"))[0] == 200
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path)
        monkeypatch.setattr(VllmServer, "load_weights", slow)
        monkeypatch.setattr("lightning_proxy.proxy.gateway.routing.MENDED_S", 0.01)
        monkeypatch.setattr("lightning_proxy.proxy.gateway.routing.WATCH_S", 0.02)
        promoting = asyncio.create_task(system.call("POST", "/policy/promote", {"version": version}))
        while not promoting.done():
            seen.add((await system.chat("r"))[0])
        assert ((await promoting)[0], seen) == (200, {200})


async def test_all_servers_being_away_is_an_error() -> None:
    one, other = "http://127.0.0.1:9/v1", "http://127.0.0.1:9/other/v1"
    async with operator_session() as session:
        alone, fleet = VllmFleet(session, [one]), VllmFleet(session, [one, other])
        for asked in (alone, fleet):
            for work in (asked.first(VllmServer.models), asked.reachable(), asked.each(VllmServer.models)):
                with pytest.raises(UpstreamUnreachable):
                    await work


async def test_agents_are_answered_by_verified_weights_while_others_are_being_verified(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.serving.swap.LEAVE_S", 2.5)
    async with replicated(running, tmp_path, "merged") as (system, second, port), listening(second.app, port):
        await until(up(system, port))
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

            calls = asyncio.create_task(_answers_until_done(system, checked))
            await swap.roll(version, 1, expected=0, check=check)
            seen = await calls
            assert checked == [{old}, {new}]
            assert seen <= {old, new}, "no call fails, and none waits for the end"
            assert await answers(system) == {new}
            assert (await store.versions.live()).verified
            await until(up(system, port))
            assert await answers(system) == {new}
            assert second.requests and system.vllm.requests


async def _answers_until_done(system: Any, checked: list[Any]) -> set[tuple[int, str]]:
    seen: set[tuple[int, str]] = set()
    while len(checked) < 2:
        seen |= await answers(system)
    return seen
