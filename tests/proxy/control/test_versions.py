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
