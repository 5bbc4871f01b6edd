"""`GET /policy/versions` and `GET /policy/steps`: what each version earned and came from, and a thousand steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import Mode, Reward, RolloutName

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def rewarded(store: Store, version: int, task: str, *rewards: float, mode: Mode = "train") -> None:
    """Rollouts of a task that began with this version."""
    for i, reward in enumerate(rewards):
        name = RolloutName(f"{task}-{mode}-v{version}-{i}", task, mode=mode)
        await store.rollouts.open([(name, f"hash of {name.rollout_id}")], {}, policy_version=version)
        await store.rewards.post([Reward(name.rollout_id, reward)], None, b"")


async def versions(store: Store, *bases: int) -> None:
    """Versions 1, 2, …, each of a step that started from the version named."""
    for base in bases:
        step = await store.steps.claim([], base)
        await store.versions.new("lora", step, {})
        await store.steps.trained(step, None, {"reward_mean": float(step), "reward_by_task": {"t": {"mean": 0.5}}})


async def test_versions_say_what_they_earned_and_what_they_came_from(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await versions(store, 0, 0)
        await rewarded(store, 0, "t", 0.0, 1.0)
        await rewarded(store, 0, "t", 0.25, mode="eval")
        await rewarded(store, 2, "t", 1.0)
        status, answer = await system.call("GET", "/policy/versions")
        assert status == 200
        assert [(v["version"], v["parent"], v["rewards"]) for v in answer["data"]] == [
            (0, None, {"train": {"mean": 0.5, "rollouts": 2}, "eval": {"mean": 0.25, "rollouts": 1}}),
            (1, 0, {}),
            (2, 0, {"train": {"mean": 1.0, "rollouts": 1}}),
        ]


async def test_two_versions_are_compared_on_the_tasks_that_both_had(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await versions(store, 0)
        for task, before, after in (("t1", [0.0, 1.0], [1.0]), ("t2", [0.25], [0.5, 1.0]), ("t3", [0.0], [0.0])):
            await rewarded(store, 0, task, *before)
            await rewarded(store, 1, task, *after)
        await rewarded(store, 0, "only a", 1.0)
        await rewarded(store, 1, "t1", 0.0, mode="eval")
        status, answer = await system.call("GET", "/policy/compare?a=0&b=1")
        low, high = answer.pop("interval")
        assert (status, answer) == (200, {
            "a": 0, "b": 1, "mode": "train", "rollouts_a": 5, "rollouts_b": 4, "tasks": 3, "mean_a": 0.25,
            "mean_b": 1.75 / 3, "difference": 1 / 3,
            "data": [
                {"task_id": "t1", "a": {"mean": 0.5, "rollouts": 2}, "b": {"mean": 1.0, "rollouts": 1}},
                {"task_id": "t2", "a": {"mean": 0.25, "rollouts": 1}, "b": {"mean": 0.75, "rollouts": 2}},
                {"task_id": "t3", "a": {"mean": 0.0, "rollouts": 1}, "b": {"mean": 0.0, "rollouts": 1}},
            ],
        })  # fmt: skip
        _, answer = await system.call("GET", "/policy/compare?a=0&b=1&costs=true")
        assert answer["data"][0]["a"] == {"mean": 0.5, "rollouts": 2, "tokens": 0.0, "latency_ms": None}
        assert (low, high) == (0.0, 0.5)  # of 27 resamples of three tasks one is all t3, eight have no t3


async def test_held_out_rollouts_are_compared_where_both_versions_have_some(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await versions(store, 0)
        for version, reward in ((0, 0.0), (1, 1.0)):
            await rewarded(store, version, "t", 0.5)
            await rewarded(store, version, "t", reward, mode="eval")
        _, found = await system.call("GET", "/policy/compare?a=1&b=0")
        assert (found["mode"], found["difference"], found["interval"]) == ("eval", -1.0, [-1.0, -1.0])
        _, found = await system.call("GET", "/policy/compare?a=1&b=0&mode=train")
        assert (found["mode"], found["difference"]) == ("train", 0.0)


async def test_versions_without_a_common_task_have_no_difference(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await versions(store, 0)
        await rewarded(store, 0, "t", 0.5)
        assert (await system.call("GET", "/policy/compare?a=0&b=1"))[1] == {
            "a": 0, "b": 1, "mode": "train", "rollouts_a": 1, "rollouts_b": 0, "tasks": 0, "mean_a": None,
            "mean_b": None, "difference": None, "interval": None, "data": [],
        }  # fmt: skip
        status, answer = await system.call("GET", "/policy/compare?a=0&b=2")
        assert (status, answer["error"]["message"]) == (404, "no policy version 2")
        for wrong in ("a=0", "a=0&b=-1", f"a=0&b={2**63}", "a=0&b=1&mode=both"):
            assert (await system.call("GET", f"/policy/compare?{wrong}"))[0] == 422


async def test_steps_come_in_pages_and_in_brief(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await versions(store, 0, 1, 2)
        _, first = await system.call("GET", "/policy/steps?limit=2")
        _, last = await system.call("GET", f"/policy/steps?limit=2&brief=true&cursor={first['next_cursor']}")
        assert [step["step"] for step in first["data"]] == [3, 2]
        assert first["data"][0]["metrics"] == {"reward_mean": 3.0, "reward_by_task": {"t": {"mean": 0.5}}}
        assert [step["metrics"] for step in last["data"]] == [{"reward_mean": 1.0}]
        assert last["next_cursor"] is None
        status, answer = await system.call("GET", "/policy/steps?cursor=x")
        assert (status, answer["error"]["param"]) == (400, "cursor")
