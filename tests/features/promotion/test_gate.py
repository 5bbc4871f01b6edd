"""New rollouts are split between candidate and live version, and their rewards decide; whose rewards do."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from contract.system import listening
from contract.vllm import PlayedVllm
from lightning_proxy.features.promotion import proxy as gate
from lightning_proxy.features.promotion.commands import line_of
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.proxy.gateway import routing
from lightning_proxy.store.versions import PolicyVersions

ADMIN = {"Authorization": "Bearer admin"}
BOTH_WAYS = pytest.mark.parametrize("publish", ["lora", "merged"])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_S", 0.05)
    monkeypatch.setattr(routing, "WATCH_S", 0.1)


@asynccontextmanager
async def gated(start: Any, publish: str = "lora", size: int = 4, most: int = 40, **proxy: Any) -> AsyncIterator[Any]:
    """A proxy with a closed gate; merged, with a second server for the candidate."""
    policy = {"promotion": "gated", "gate": {"max_rollouts": most}}
    settings = {"publish": publish, "policy": policy, "trainer": {"group_size": size}, **proxy}
    second = PlayedVllm(Path("base"))
    async with AsyncExitStack() as stack:
        if publish == "merged":
            settings["replicas"] = [f"{await stack.enter_async_context(listening(second.app))}/v1"]
        system = await stack.enter_async_context(start(**settings))
        system.second = second
        yield system


async def candidate(system: Any) -> int:
    """A version that is tested from now on, and served."""
    async with system.store() as store:
        version: int = await system.candidate(store, system.vllm.root)
    if system.config.policy.publish == "merged":
        await has(system, system.second, version)
        return version
    while f"policy-v{version}" not in system.vllm.adapters:
        await asyncio.sleep(0.02)
    return version


async def has(system: Any, server: Any, version: int) -> None:
    """Wait until a server has the merged weights, and none is down."""
    while not server.label.startswith(f"{version}-") or await downs(system):
        await asyncio.sleep(0.02)


async def downs(system: Any) -> Any:
    return (await system.get("/readyz")).get("down")


async def served(system: Any, rollout: str, task: str | None = None, **headers: str) -> int:
    """The version that answered a call of the rollout."""
    _, answer = await system.chat(rollout, **({"X_Task_Id": task} if task else {}), **headers)
    found = re.search(r"\bv(\d+)\b", answer["choices"][0]["message"]["content"])
    return int(found[1]) if found else 0


async def of_four(system: Any, name: str, task: str | None = None, **headers: str) -> set[int]:
    """The versions that answered four rollouts."""
    return {await served(system, f"{name}{i}", task, **headers) for i in range(4)}


async def rewarded(system: Any, tasks: int, reward: Callable[[int], float]) -> None:
    """Whole groups of rollouts, each rewarded by the version that answered it."""
    for i in range(4 * tasks):
        version = await served(system, f"r{i}", f"t{i // 4}")
        await system.post("/reward", {"rollout_id": f"r{i}", "reward": reward(version)})


async def seen(system: Any, version: int = 1, **key: str) -> Any:
    answer = await system.get("/policy/versions", **key)
    return next(one for one in answer["data"] if one["version"] == version)


async def decided(system: Any, version: int = 1, **key: str) -> Any:
    """The version, once its test is decided."""
    while (found := await seen(system, version, **key))["promotion"]["status"] == "testing":
        await asyncio.sleep(0.05)
    return found


@BOTH_WAYS
async def test_siblings_are_split_over_both_versions_and_each_keeps_its_own(start: Any, publish: str) -> None:
    async with gated(start, publish) as system:
        assert await of_four(system, "before") == {0}
        version = await candidate(system)
        # What began before or is held out stays with the live version, and is not compared.
        assert await of_four(system, "before") == {0}
        assert await of_four(system, "held", X_Rollout_Mode="eval") == {0}
        assert await of_four(system, "off", X_Recording="off") == {0}
        async with system.store() as store:
            tests = Promotions(store.database)
            assert await tests.observed((await tests.now()).promotion) == []
        names = [(f"{task}-{i}", task) for task in ("a", "b", "c") for i in range(4)]
        first = {name: await served(system, name, task) for name, task in names}
        for task in ("a", "b", "c"):
            assert Counter(v for name, v in first.items() if name.startswith(task)) == {0: 2, version: 2}
        assert {name: await served(system, name, task) for name, task in names} == first
        opened = await system.post("/rollouts", {"task_id": "d", "n": 4})  # their calls name no task
        assert Counter([await served(system, one["rollout_id"]) for one in opened]) == {0: 2, version: 2}
        lone = [await served(system, f"lone{i}") for i in range(6)]
        assert [sorted(lone[i : i + 2]) for i in (0, 2, 4)] == [[0, version]] * 3


@BOTH_WAYS
@pytest.mark.parametrize("better", [False, True])
async def test_rewards_decide_whether_a_candidate_goes_live_or_back(start: Any, publish: str, better: bool) -> None:
    async with gated(start, publish, most=200) as system:
        version = await candidate(system)
        await rewarded(system, 12, lambda v: float((v == version) == better))
        found = await decided(system, version)
        test, now = found["promotion"], version if better else 0
        told = (found["status"], found["live"], test["status"], test["against"])
        assert told == (("live", True, "promoted", 0) if better else ("rejected", False, "rejected", 0))
        if not better:
            assert found["error"].startswith("reward is worse: -1.000 on average over ")
            assert test["reason"] == found["error"]
        assert (await system.get("/policy"))["live_version"] == now
        if publish == "merged":
            await has(system, system.vllm if better else system.second, now)
        assert await of_four(system, "after") == {now}


@pytest.mark.parametrize("down", ["candidate", "live"])
async def test_while_one_version_has_no_server_the_other_answers(start: Any, down: str) -> None:
    async with gated(start, "merged") as system:
        version = await candidate(system)
        assert await of_four(system, "r", "t") == {0, version}
        server = system.second if down == "candidate" else system.vllm
        server.label, server.refuses = "lost", "/pause"
        while not await downs(system):
            await asyncio.sleep(0.02)
        assert await of_four(system, "r", "t") == {0 if down == "candidate" else version}


async def test_a_gate_that_is_opened_ends_the_test(start: Any) -> None:
    async with gated(start) as system:
        version = await candidate(system)
    async with start(publish="lora") as system:
        found = await seen(system, version)
        assert (found["status"], found["promotion"]["status"]) == ("ready", "ended")
        assert found["promotion"]["reason"] == "promotion.mode was set to immediate"
        assert await of_four(system, "r", "t") == {0}


async def test_a_decision_between_two_readings_names_no_version_that_did_not_answer(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gated(start, "merged") as system:
        version = await candidate(system)
        read, reads = PolicyVersions.live_now, count(1)

        async def decided_after(self: PolicyVersions) -> Any:
            live = await read(self)
            if next(reads) == 3:  # two are of the watch, the next one is of the router
                async with system.store() as store:
                    test: Any = await Promotions(store.database).under_way()
                    await Promotions(store.database).decide(test, "promoted", "so it is", {})
            return live

        monkeypatch.setattr(routing, "WATCH_S", 1000)
        await asyncio.sleep(0.3)  # no look of its own is under way
        monkeypatch.setattr(PolicyVersions, "live_now", decided_after)
        assert await served(system, "r", "t") == version
        (call,) = (await system.get("/rollouts/r"))["calls"]
        assert call["policy_version"] == version


@pytest.mark.feature("page")
async def test_a_test_is_shown_while_it_is_under_way_and_after_it(start: Any, tmp_path: Path) -> None:
    from support.views import drawn  # reads the page

    async with gated(start) as system:

        async def told(*command: str) -> str:
            return " ".join((await system.lightning(*command)).stdout.split())

        version = await candidate(system)
        policy = await system.get("/policy")
        assert (policy["promotion"], policy["test"]["version"]) == ("gated", version)
        await rewarded(system, 2, lambda version: 0.5 + version / 4)
        while (evidence := (await system.get("/policy"))["test"]["evidence"]).get("groups") != 2:
            pass
        shown = f"testing version {version} against 0: 8 of at most 40 rollouts; reward +0.25 (2 pairs, undecided)"
        assert shown in await told("policy", "list") and shown in await told("status")
        (page,) = await drawn(system, tmp_path, "versions")
        row = "reward margin 0.120.50.75+0.25−"  # 2 pairs, 0.5 and 0.75
        for words in (f"Version {version} is tested against 0", "8 of at most 40 rollouts", row, "undecided"):
            assert words in page["text"]
        assert (await system.call("POST", "/policy/rollback"))[0] == 409
        await system.post("/policy/promote", {"version": 0})
        ended = f"the test of version {version} against 0 is over (ended): version 0 was made live during the test"
        assert ended in await told("policy", "list")
        assert (await seen(system, version))["promotion"]["evidence"] == evidence, "its numbers are kept"


# Only an admin's key, and one made with `keys create --evaluator`, decides which version goes live.


@pytest.fixture
async def tested(start: Any) -> AsyncIterator[Any]:
    """A proxy with keys that tests version 1 against version 0."""
    async with gated(start, size=2, api_keys=["agent"], admin_keys=["admin"]) as system:
        assert await candidate(system) == 1
        yield system


async def began(system: Any, opener: Any, own_keys: bool = False, n: int = 40) -> Any:
    """Rollouts that take part in the test, each with its version and the key that is used for it."""
    found = []
    for i in range(n // 2):
        for one in await system.post("/rollouts", {"task_id": f"t{i}", "n": 2}, **opener):
            name, key = one["rollout_id"], {"Authorization": f"Bearer {one['api_key']}"} if own_keys else opener
            found.append((name, await served(system, name, **key), key))
    return found


async def reward(system: Any, rollouts: Any, key: Any = None, good: int = 1) -> None:
    """1 for rollouts of the version `good`, 0 for others. `key`: of the sender, else each rollout's."""
    for name, version, own in rollouts:
        await system.post("/reward", {"rollout_id": name, "reward": float(version == good)}, **(key or own))


async def outcome(system: Any) -> Any:
    test = (await decided(system, **ADMIN))["promotion"]
    return test["status"], test["evidence"]["metrics"]["reward"]["difference"]


@pytest.mark.parametrize("scope", ["own rollout's", "configured"])
async def test_a_key_that_is_no_evaluators_decides_nothing(tested: Any, scope: str) -> None:
    key = {"Authorization": "Bearer agent"} if scope == "configured" else await tested.key("a", scope="own")
    evaluator = await tested.key("e", evaluator=True)
    for opener, good in ((key, 1), (evaluator, 0)):  # the first does not use up the bound of the test either
        found = await began(tested, opener, own_keys=good == 1 and "rollout" in scope)
        assert Counter(version for _, version, _ in found) == {0: 20, 1: 20}
        await reward(tested, found, good=good)
        if opener is key:
            await asyncio.sleep(1.5)  # the gate has looked at all that there is
            test = (await seen(tested, **ADMIN))["promotion"]
            assert (test["status"], test["evidence"].get("rollouts", 0)) == ("testing", 0)
            assert "0 of at most 40 rollouts that an admin's or an evaluator's key opened" in line_of(test).plain
    assert await outcome(tested) == ("rejected", -1.0)


@pytest.mark.parametrize("who", ["admin", "own evaluator", "evaluator's rollout"])
async def test_an_admins_and_an_evaluators_rewards_decide(tested: Any, who: str) -> None:
    scope = "own" if who.startswith("own") else "all"
    key = ADMIN if who == "admin" else await tested.key("e", evaluator=True, scope=scope)
    await reward(tested, await began(tested, key, own_keys="rollout" in who))
    assert await outcome(tested) == ("promoted", 1.0)


async def test_an_evaluators_word_about_a_tenants_rollouts_counts_and_the_tenants_own_does_not(tested: Any) -> None:
    tenant, evaluator = await tested.key("t", scope="own"), await tested.key("e", evaluator=True)
    found = await began(tested, tenant)
    await reward(tested, found, evaluator, good=0)
    await reward(tested, found, tenant, good=1)  # the newest value, but no evidence
    assert await outcome(tested) == ("rejected", -1.0)


async def test_a_tenants_rollout_is_no_evidence_once_the_evaluators_word_is_taken_back(tested: Any) -> None:
    async with tested.store() as store:
        tests = Promotions(store.database)
        test: Any = await tests.under_way()
        (name, _, _), _ = await began(tested, await tested.key("t", scope="own"), n=2)
        given = await tested.post("/reward", {"rollout_id": name, "reward": 0, "name": "human"}, **ADMIN)
        assert len(await tests.observed(test)) == 1
        assert (await tested.call("DELETE", f"/rollouts/{name}/rewards/{given['reward_id']}", **ADMIN))[0] == 204
        assert await tests.observed(test) == []


@pytest.mark.parametrize("status", ["failed", "discarded"])
async def test_a_rollout_that_another_key_ended_has_not_failed(tested: Any, status: str) -> None:
    other, evaluator = await tested.key("o"), await tested.key("e", evaluator=True)
    found = await began(tested, evaluator)
    for name in (name for name, version, _ in found if version == 1):
        await tested.post(f"/rollouts/{name}/end", {"status": status}, **other)
    await reward(tested, found, evaluator)
    test = (await decided(tested, **ADMIN))["promotion"]
    assert (test["status"], test["evidence"]["candidate"]["failed"]) == ("promoted", 0)


async def test_a_tenant_does_not_shift_the_sides_of_an_evaluators_rollouts(tested: Any) -> None:
    tenant, sides = await tested.key("t", scope="own"), Counter[int]()
    for i in range(8):
        for key in (tenant, ADMIN, ADMIN):
            opened = await tested.post("/rollouts", {"task_id": "t"}, **key)
            sides[await served(tested, opened[0]["rollout_id"], **key)] += key is ADMIN
        assert sides[0] == sides[1] == i + 1
