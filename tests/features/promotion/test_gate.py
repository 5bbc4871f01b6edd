"""New rollouts are split between candidate and live version, and their rewards decide."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.system import listening
from lightning_proxy.features.promotion import gate
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.proxy.gateway import routing
from lightning_proxy.store.versions import PolicyVersions

GATED = {"promotion": "gated", "gate": {"max_rollouts": 40}}
GROUPS = {"group_size": 4}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_S", 0.05)
    monkeypatch.setattr(routing, "WATCH_S", 0.1)


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(30):
        while not (found := await condition()):
            await asyncio.sleep(0.02)
    return found


@asynccontextmanager
async def gated(running: Any, tmp_path: Path, publish: str, **policy: Any) -> AsyncIterator[Any]:
    """A proxy with a closed gate; merged, with a second server for the candidate."""
    settings = {"publish": publish, "policy": GATED | policy, "trainer": GROUPS}
    if publish == "lora":
        async with running(tmp_path, **settings) as system:
            yield system
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    async with (
        running(tmp_path, replicas=[f"http://127.0.0.1:{port}/v1"], **settings) as system,
        listening((second := type(system.vllm)(tmp_path)).app, port),
    ):
        system.second = second
        yield system


async def served(system: Any, rollout: str, task: str | None = None, **headers: str) -> int:
    """The version that answered a call of the rollout, which is what its header says."""
    said = {"X_Task_Id": task} if task else {}
    status, answer = await system.chat(rollout, **said, **headers)
    assert status == 200, answer
    _, detail = await system.call("GET", f"/rollouts/{rollout}")
    call = detail["calls"][-1]
    text = answer["choices"][0]["message"]["content"]
    version: int = call["policy_version"]
    assert (f"v{version}" in text) == (version > 0), text
    return version


async def ready(system: Any, publish: str, version: int) -> None:
    """Wait until the candidate can be served."""

    async def is_served() -> bool:
        if publish == "lora":
            return f"policy-v{version}" in system.vllm.adapters
        return bool(system.second.label.startswith(f"{version}-")) and not await downs(system)

    await until(is_served)


async def downs(system: Any) -> list[str]:
    found: list[str] = (await system.call("GET", "/readyz"))[1].get("down", [])
    return found


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_siblings_are_split_over_both_versions_and_each_keeps_its_own(
    running: Any, tmp_path: Path, publish: str
) -> None:
    async with gated(running, tmp_path, publish) as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        await ready(system, publish, version)
        names = [(f"{task}-{i}", task) for task in ("a", "b", "c") for i in range(4)]
        first = {name: await served(system, name, task) for name, task in names}
        for task in ("a", "b", "c"):
            assert Counter(v for name, v in first.items() if name.startswith(task)) == {0: 2, version: 2}
        assert {name: await served(system, name, task) for name, task in names} == first
        for name, version_of_it in first.items():
            calls = (await system.call("GET", f"/rollouts/{name}"))[1]["calls"]
            assert [call["policy_versions"] for call in calls] == [[version_of_it]] * 2
        _, opened = await system.call("POST", "/rollouts", {"task_id": "d", "n": 4})  # their calls name no task
        assert Counter([await served(system, one["rollout_id"]) for one in opened]) == {0: 2, version: 2}
        lone = [await served(system, f"lone{i}") for i in range(6)]
        assert [sorted(lone[i : i + 2]) for i in (0, 2, 4)] == [[0, version]] * 3


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_rollouts_that_began_before_or_are_held_out_stay_with_the_live_version(
    running: Any, tmp_path: Path, publish: str
) -> None:
    async with gated(running, tmp_path, publish) as system:
        assert {await served(system, f"before{i}") for i in range(4)} == {0}
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        await ready(system, publish, version)
        assert {await served(system, f"before{i}") for i in range(4)} == {0}
        assert {await served(system, f"held{i}", X_Rollout_Mode="eval") for i in range(4)} == {0}
        unrecorded = [await system.chat(f"off{i}", X_Recording="off") for i in range(4)]
        assert {"v" in answer["choices"][0]["message"]["content"].split()[-1] for _, answer in unrecorded} <= {False}
        async with system.store() as store:
            assert await Promotions(store.database).observed((await Promotions(store.database).now()).promotion) == []


async def rewarded(system: Any, tasks: int, reward: Callable[[int, int], float]) -> Counter[int]:
    """Whole groups of rollouts, each rewarded by the version that answered it and its number."""
    seen = Counter[int]()
    for task in range(tasks):
        for i in range(4):
            rollout = f"t{task}-{i}"
            version = await served(system, rollout, f"t{task}")
            seen[version] += 1
            await system.call("POST", "/reward", {"rollout_id": rollout, "reward": reward(version, i)})
    return seen


async def decided(system: Any, version: int) -> dict[str, Any]:
    """The version, once its test is decided."""

    async def look() -> dict[str, Any] | None:
        _, answer = await system.call("GET", "/policy/versions")
        found = next(one for one in answer["data"] if one["version"] == version)
        return found if found["promotion"]["status"] != "testing" else None

    found: dict[str, Any] = await until(look)
    return found


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_a_candidate_that_is_worse_is_taken_back_by_itself(running: Any, tmp_path: Path, publish: str) -> None:
    async with gated(running, tmp_path, publish) as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        await ready(system, publish, version)
        await rewarded(system, 10, lambda v, _: 0.0 if v == version else 1.0)
        found = await decided(system, version)
        assert (found["status"], found["live"]) == ("rejected", False)
        assert found["error"].startswith("reward is worse: -1.000 on average of ")
        test = found["promotion"]
        assert (test["status"], test["against"], test["reason"]) == ("rejected", 0, found["error"])
        assert test["evidence"]["metrics"]["reward"]["verdict"] == "worse"
        assert (await system.call("GET", "/policy"))[1]["live_version"] == 0
        if publish == "merged":
            await until(lambda: _has_label(system.second, "0-"))
            await until(lambda: _none_down(system))
        assert {await served(system, f"after{i}") for i in range(4)} == {0}


@pytest.mark.parametrize("publish", ["lora", "merged"])
async def test_a_candidate_that_is_better_goes_live(running: Any, tmp_path: Path, publish: str) -> None:
    async with gated(running, tmp_path, publish, gate={"max_rollouts": 200}) as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        await ready(system, publish, version)
        await rewarded(system, 12, lambda v, _: 1.0 if v == version else 0.0)
        found = await decided(system, version)
        assert (found["status"], found["live"], found["promotion"]["status"]) == ("live", True, "promoted")
        if publish == "merged":
            await until(lambda: _has_label(system.vllm, f"{version}-"))
            await until(lambda: _none_down(system))
        assert {await served(system, f"after{i}") for i in range(4)} == {version}


async def _has_label(server: Any, label: str) -> bool:
    return bool(server.label.startswith(label))


async def _none_down(system: Any) -> bool:
    return not await downs(system)


async def test_a_promotion_by_hand_ends_the_test_and_says_so(running: Any, tmp_path: Path) -> None:
    publish = "merged"
    async with gated(running, tmp_path, publish) as system:
        async with system.store() as store:
            earlier = await system.earlier_version(store, tmp_path)
            version = await system.candidate(store, tmp_path)
        await ready(system, publish, version)
        assert (await system.call("POST", "/policy/promote", {"version": earlier}))[0] == 200
        _, answer = await system.call("GET", "/policy/versions")
        found = answer["data"][version]
        assert (found["status"], found["promotion"]["status"]) == ("ready", "ended")
        assert found["promotion"]["reason"] == f"version {earlier} was made live during the test"
        await until(lambda: _none_down(system))
        assert {await served(system, f"r{i}") for i in range(4)} == {earlier}


async def test_no_more_than_the_bound_of_rollouts_are_compared(running: Any, tmp_path: Path) -> None:
    async with gated(running, tmp_path, "lora", gate={"max_rollouts": 4}) as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        await ready(system, "lora", version)
        assert Counter([await served(system, f"r{i}", "t") for i in range(12)]) == {0: 10, version: 2}
        for i in range(4):
            reward = 0.0 if await served(system, f"r{i}", "t") == version else 1.0
            await system.call("POST", "/reward", {"rollout_id": f"r{i}", "reward": reward})
        found = await decided(system, version)
        assert found["status"] == "rejected"
        assert found["error"].startswith("undecided at max_rollouts, more than half a drop: reward: -1.000")


@pytest.mark.parametrize("down", ["candidate", "live"])
async def test_while_one_version_has_no_server_the_other_answers(running: Any, tmp_path: Path, down: str) -> None:
    async with gated(running, tmp_path, "merged") as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        await ready(system, "merged", version)
        names = [f"r{i}" for i in range(4)]
        assert sorted([await served(system, name, "t") for name in names]) == [0, 0, version, version]
        server = system.second if down == "candidate" else system.vllm
        server.label, server.refuses = "lost", "/pause"
        await until(lambda: downs(system))
        other = 0 if down == "candidate" else version
        assert {await served(system, name, "t") for name in names} == {other}


async def test_a_gate_that_is_opened_ends_the_test(running: Any, tmp_path: Path) -> None:
    async with gated(running, tmp_path, "lora") as system, system.store() as store:
        version = await system.candidate(store, tmp_path)
    async with running(tmp_path, publish="lora") as system:
        found = (await system.call("GET", "/policy/versions"))[1]["data"][version]
        assert (found["status"], found["promotion"]["status"]) == ("ready", "ended")
        assert found["promotion"]["reason"] == "promotion.mode was set to immediate"
        assert {await served(system, f"r{i}", "t") for i in range(4)} == {0}


async def test_a_decision_between_two_readings_names_no_version_that_did_not_answer(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gated(running, tmp_path, "merged") as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        await ready(system, "merged", version)
        read, reads = PolicyVersions.live_now, 0

        async def decided_after(self: PolicyVersions) -> Any:
            nonlocal reads
            live = await read(self)
            reads += 1
            if reads == 3:  # two are of the watch, the next one is of the router
                async with system.store() as store:
                    test = (await Promotions(store.database).now()).promotion
                    await Promotions(store.database).decide(test, "promoted", "so it is", {})
            return live

        monkeypatch.setattr(routing, "WATCH_S", 1000)
        await asyncio.sleep(0.3)  # no look of its own is under way
        monkeypatch.setattr(PolicyVersions, "live_now", decided_after)
        assert await served(system, "r", "t") == version
