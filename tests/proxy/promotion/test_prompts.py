"""A prompt's new version is tested by new rollouts before it goes live."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.gate import gate
from lightning_proxy.proxy.policy.routing import PolicyRouter
from lightning_proxy.proxy.policy.swap import NotServed
from lightning_proxy.proxy.prompts.prompt_tests import PromptTest, PromptTests

GATED = {"promotion": "gated", "gate": {"max_rollouts": 40}}
TEXTS = ("You are a writer.", "You are a careful writer.", "You are a clown.")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LOOK_S", 0.05)


@asynccontextmanager
async def gated(running: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """A proxy whose prompts have a gate, and the three versions of the prompt `writer`, of which the first is live."""
    async with running(tmp_path, prompts=GATED, trainer={"group_size": 4}) as system:
        for text in TEXTS:
            body = {"name": "writer", "text": text, "match": {"agent": "writer"}}
            assert (await system.call("POST", "/prompts", body))[0] == 200
        await asyncio.sleep(0.6)  # the first prompt of a running proxy
        yield system


async def begin(system: Any, version: int) -> Any:
    status, answer = await system.call("POST", "/prompts/writer/test", {"version": version})
    assert status == 200, answer
    return answer


async def shown(system: Any, rollout: str, task: str | None = None, **headers: str) -> int:
    """The version that the model was shown in a call of the rollout."""
    body = {"model": "policy", "messages": [{"role": "system", "content": TEXTS[0]}, {"role": "user", "content": "go"}]}
    names = {"X-Rollout-Id": rollout, "X-Agent-Name": "writer"} | ({"X-Task-Id": task} if task else {})
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    async with system.session.post(f"{system.url}/v1/chat/completions", json=body, headers=names) as answer:
        assert answer.status == 200, await answer.text()
    if headers.get("X_Recording") == "off":
        return 0
    _, detail = await system.call("GET", f"/rollouts/{rollout}?requests=whole")
    call = detail["calls"][-1]
    placed = next(one for one in detail["prompts"] if one["call_id"] == call["call_id"])
    version: int = placed["version"]
    assert call["request"]["messages"][0]["content"] == TEXTS[version - 1]
    return version


async def rewarded(system: Any, tasks: int, reward: Callable[[int], float]) -> Counter[int]:
    """Whole groups of rollouts, each rewarded by the version that it was shown."""
    seen = Counter[int]()
    for task in range(tasks):
        for i in range(4):
            version = await shown(system, f"t{task}-{i}", f"t{task}")
            seen[version] += 1
            await system.call("POST", "/reward", {"rollout_id": f"t{task}-{i}", "reward": reward(version)})
    return seen


async def decided(system: Any, version: int) -> Any:
    """The prompt, once the test of this version is over."""
    async with asyncio.timeout(30):
        while True:
            _, prompt = await system.call("GET", "/prompts/writer")
            if prompt["versions"][version - 1]["promotion"]["status"] != "testing":
                return prompt
            await asyncio.sleep(0.05)


async def test_siblings_are_split_over_both_versions_and_each_keeps_its_own(running: Any, tmp_path: Path) -> None:
    async with gated(running, tmp_path) as system:
        assert await shown(system, "before") == 1
        answer = await begin(system, 2)
        assert (answer["live_version"], answer["test"]["version"], answer["test"]["against"]) == (1, 2, 1)
        names = [(f"{task}-{i}", task) for task in "abc" for i in range(4)]
        first = {name: await shown(system, name, task) for name, task in names}
        for task in "abc":
            assert Counter(v for name, v in first.items() if name.startswith(task)) == {1: 2, 2: 2}
        assert {name: await shown(system, name, task) for name, task in names} == first
        assert await shown(system, "before") == 1
        assert {await shown(system, f"held{i}", X_Rollout_Mode="eval") for i in range(4)} == {1}
        for i in range(4):
            await shown(system, f"off{i}", X_Recording="off")
        async with system.store() as store:
            (test,) = await PromptTests(store.database).under_way()
            assert {one.rollout_id: one.version for one in await PromptTests(store.database).observed(test)} == first


async def test_a_rollout_that_asks_for_the_text_takes_part(running: Any, tmp_path: Path) -> None:
    async with gated(running, tmp_path) as system:
        await begin(system, 2)
        _, opened = await system.call("POST", "/rollouts", {"task_id": "t", "n": 4})
        asked = {}
        for one in opened:
            _, prompt = await system.call("GET", "/prompts/writer", **{"X-Rollout-Id": one["rollout_id"]})
            asked[one["rollout_id"]] = prompt["version"]
        assert Counter(asked.values()) == {1: 2, 2: 2}
        assert {name: await shown(system, name) for name in asked} == asked
        _, prompt = await system.call("GET", "/prompts/writer", **{"X-Rollout-Id": "nobody"})
        assert prompt["version"] == 1
        _, opened = await system.call("POST", "/rollouts", {"n": 4})
        for one in opened:
            status, _ = await system.call("POST", f"/rollouts/{one['rollout_id']}/end", {"status": "completed"})
            _, prompt = await system.call("GET", "/prompts/writer", **{"X-Rollout-Id": one["rollout_id"]})
            assert (status, prompt["version"]) == (200, 1)


async def test_a_version_that_is_worse_is_taken_back_and_a_better_one_goes_live(running: Any, tmp_path: Path) -> None:
    async with gated(running, tmp_path) as system:
        await begin(system, 3)
        assert (await begin(system, 2))["waiting"] == 2
        await rewarded(system, 10, lambda version: 0.0 if version == 3 else 1.0)
        prompt = await decided(system, 3)
        test = prompt["versions"][2]["promotion"]
        assert (test["status"], prompt["live_version"]) == ("rejected", 1)
        assert test["reason"].startswith("reward is worse: -1.000 on average of ")
        # The one that waited is tested now, by rollouts that begin now.
        assert (prompt["test"]["version"], prompt["test"]["against"], prompt["waiting"]) == (2, 1, None)
        for task in range(20, 30):
            for i in range(4):
                version = await shown(system, f"t{task}-{i}", f"t{task}")
                await system.call("POST", "/reward", {"rollout_id": f"t{task}-{i}", "reward": float(version == 2)})
        prompt = await decided(system, 2)
        assert (prompt["versions"][1]["promotion"]["status"], prompt["live_version"]) == ("promoted", 2)
        assert prompt["versions"][1]["promotion"]["evidence"]["metrics"]["reward"]["verdict"] == "safe"
        assert {await shown(system, f"after{i}") for i in range(4)} == {2}


async def test_a_version_that_is_added_to_go_live_is_tested_first(running: Any, tmp_path: Path) -> None:
    async with gated(running, tmp_path) as system:
        body = {"name": "writer", "text": TEXTS[1], "promote": True}
        _, answer = await system.call("POST", "/prompts", body)
        assert (answer["version"], answer["live_version"], answer["test"]["version"]) == (2, 1, 2)
        _, answer = await system.call("POST", "/prompts", body)
        assert (answer["test"]["version"], answer["waiting"]) == (2, None)
        _, answer = await system.call("POST", "/prompts", {"name": "new", "text": "Be kind.", "promote": True})
        assert (answer["live_version"], answer["test"]) == (1, None)
        status, answer = await system.call("POST", "/prompts/writer/test", {"version": 1})
        assert (status, answer["error"]["message"]) == (
            409, "prompt 'writer' version 1 is live: there is nothing to test",
        )  # fmt: skip
        assert (await system.call("POST", "/prompts/writer/test", {"version": 9}))[0] == 404


@pytest.mark.parametrize("how", ["promote", "rollback"])
async def test_a_choice_by_hand_ends_the_test(running: Any, tmp_path: Path, how: str) -> None:
    async with gated(running, tmp_path) as system:
        await system.call("POST", "/prompts/writer/promote", {"version": 2})
        await begin(system, 3)
        chosen = 2 if how == "promote" else 1
        await system.call("POST", f"/prompts/writer/{how}", {"version": 2} if how == "promote" else None)
        _, prompt = await system.call("GET", "/prompts/writer")
        test = prompt["versions"][2]["promotion"]
        assert (test["status"], prompt["test"], prompt["live_version"]) == ("ended", None, chosen)
        assert test["reason"] == f"version {chosen} was made live during the test"
        assert {await shown(system, f"r{i}", "t") for i in range(4)} == {chosen}


async def test_a_gate_that_is_opened_ends_the_test_and_refuses_another(running: Any, tmp_path: Path) -> None:
    async with gated(running, tmp_path) as system:
        await begin(system, 2)
        await begin(system, 3)
    async with running(tmp_path) as system:
        _, prompt = await system.call("GET", "/prompts/writer")
        test = prompt["versions"][1]["promotion"]
        assert (test["status"], test["reason"]) == ("ended", "prompts.promotion was set to immediate")
        assert prompt["waiting"] is None
        assert {await shown(system, f"r{i}", "t") for i in range(4)} == {1}
        status, answer = await system.call("POST", "/prompts/writer/test", {"version": 2})
        assert status == 409 and "set prompts.promotion to gated" in answer["error"]["message"]


async def test_a_call_that_no_server_gets_is_in_no_test(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gated(running, tmp_path) as system:
        await begin(system, 2)

        async def refuses(*_: Any, **__: Any) -> Any:
            raise NotServed("the live version is not served")

        monkeypatch.setattr(PolicyRouter, "route", refuses)
        with pytest.raises(AssertionError, match="not served"):
            await shown(system, "r", "t")
        async with system.store() as store:
            assert await store.database.all("SELECT * FROM prompt_test_rollouts") == []


async def test_a_rollout_with_a_reward_and_one_that_asks_for_a_version_are_in_no_test(
    running: Any, tmp_path: Path
) -> None:
    async with gated(running, tmp_path) as system:
        await begin(system, 2)
        _, opened = await system.call("POST", "/rollouts", {"task_id": "t", "n": 2})
        early, asks = (one["rollout_id"] for one in opened)
        status, _ = await system.call("POST", "/reward", {"rollout_id": early, "reward": 0.9, "final": False})
        assert (status, await shown(system, early)) == (200, 1)
        _, prompt = await system.call("GET", "/prompts/writer?version=3", **{"X-Rollout-Id": asks})
        assert prompt["version"] == 3
        async with system.store() as store:
            assert await store.database.all("SELECT * FROM prompt_test_rollouts") == []


async def test_one_test_that_cannot_be_weighed_holds_up_no_other(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = PromptTests.observed

    async def broken(self: PromptTests, test: PromptTest) -> Any:
        if test.name == "other":
            raise ValueError("a row that cannot be read")
        return await observed(self, test)

    monkeypatch.setattr(PromptTests, "observed", broken)
    async with gated(running, tmp_path) as system:
        for text in ("one", "two"):
            await system.call("POST", "/prompts", {"name": "other", "text": text, "promote": True})
        await begin(system, 3)
        await rewarded(system, 10, lambda version: 0.0 if version == 3 else 1.0)
        assert (await decided(system, 3))["versions"][2]["promotion"]["status"] == "rejected"
