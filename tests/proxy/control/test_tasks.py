"""`GET /tasks`: the tasks of the newest rollouts, their rewards over time, and which are never or always solved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.store.reports import tasks
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import Mode, Reward, RolloutName

Running = Callable[..., AbstractAsyncContextManager[Any]]

SCALES = [(0.0, 1.0), (-1.0, 1.0), (3.0, 250.0)]


async def add(store: Store, task: str | None, *rewards: float | None, mode: Mode = "train", version: int = 0) -> None:
    """Rollouts of a task, named TASK-0, TASK-1, …; None: still without a reward."""
    for i, reward in enumerate(rewards):
        name = RolloutName(f"{task}-{i}", task, mode=mode)
        await store.rollouts.open([(name, f"hash of {name.rollout_id}")], {}, policy_version=version)
        if reward is not None:
            await store.rewards.post([Reward(name.rollout_id, reward)], None, b"")


async def listed(system: Any, query: str = "", **headers: str) -> Any:
    status, answer = await system.call("GET", f"/tasks{query}", **headers)
    assert status == 200, answer
    return answer


def names(page: Any) -> list[str]:
    return [task["task_id"] for task in page["data"]]


async def test_a_task_shows_its_rewards_over_time(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await add(store, "t", 1.0, 3.0, None)
        await add(store, None, 9.0)
        answer = await listed(system)
        assert (answer["next_cursor"], answer["of_newest"]) == (None, 4)
        (task,) = answer["data"]
        recent = task.pop("recent")
        ended = (await store.rollouts.get("t-1")).ended_at
        assert task == {
            "task_id": "t", "rollouts": 3, "rewarded": 2, "mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0,
            "solved": "sometimes", "last_at": (await store.rollouts.get("t-2")).created_at,
        }  # fmt: skip
        assert [r["rollout_id"] for r in recent] == ["t-0", "t-1"]
        assert recent[1] == {"rollout_id": "t-1", "reward": 3.0, "at": ended, "mode": "train", "policy_version": 0}


async def test_the_newest_rewards_of_a_task_are_shown(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await add(store, "t", *(float(i) for i in range(40)))
        (task,) = (await listed(system))["data"]
        assert [r["reward"] for r in task["recent"]] == [float(i) for i in range(8, 40)]
        assert (task["rewarded"], task["min"]) == (40, 0.0)


@pytest.mark.parametrize(("low", "high"), SCALES)
async def test_tasks_that_are_never_or_always_solved_are_told_on_any_scale(
    running: Running, tmp_path: Path, low: float, high: float
) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await add(store, "hard", low, low)
        only = (await listed(system))["data"]
        await add(store, "easy", high)
        await add(store, "some", low, high)
        await add(store, "new", None)
        assert [task["solved"] for task in only] == [None]
        found = {task["task_id"]: task["solved"] for task in (await listed(system))["data"]}
        assert found == {"hard": "never", "easy": "always", "some": "sometimes", "new": None}
        (alone,) = (await listed(system, "?task_id=hard"))["data"]
        assert alone["solved"] == "never"


async def test_tasks_are_sorted_and_filtered(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await add(store, "good", 1.0, 1.0, 1.0)
        await add(store, "wide", 0.0, 1.0)
        await add(store, "new", None)
        await add(store, "held-out", 0.25, mode="eval", version=1)
        assert names(await listed(system)) == ["held-out", "new", "wide", "good"]
        assert names(await listed(system, "?sort=mean")) == ["good", "wide", "held-out", "new"]
        assert names(await listed(system, "?sort=spread")) == ["wide", "held-out", "good", "new"]
        assert names(await listed(system, "?sort=rollouts&mode=train")) == ["good", "wide", "new"]
        assert names(await listed(system, "?mode=eval")) == ["held-out"]
        assert names(await listed(system, "?task_id=wide")) == ["wide"]
        assert names(await listed(system, "?task_id=unknown")) == []


async def test_pages_of_tasks_go_on_and_end(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for i in range(5):
            await add(store, f"t{i}", 1.0)
        first = await listed(system, "?limit=2")
        second = await listed(system, f"?limit=2&cursor={first['next_cursor']}")
        last = await listed(system, f"?limit=2&cursor={second['next_cursor']}")
        assert [names(page) for page in (first, second, last)] == [["t4", "t3"], ["t2", "t1"], ["t0"]]
        assert last["next_cursor"] is None


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("cursor=-1", 400, "cursor"),
        ("cursor=x", 400, "cursor"),
        ("sort=best", 422, "query.sort"),
        ("limit=0", 422, "query.limit"),
        ("mode=both", 422, "query.mode"),
    ],
)
async def test_a_wrong_question_is_refused_by_name(
    running: Running, tmp_path: Path, query: str, status: int, param: str
) -> None:
    async with running(tmp_path) as system:
        got, answer = await system.call("GET", f"/tasks?{query}")
        assert (got, answer["error"]["param"]) == (status, param)


async def test_only_so_many_rollouts_are_looked_at(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "NEWEST", 3)
    async with running(tmp_path) as system, system.store() as store:
        await add(store, "old", 1.0)
        await add(store, "new", 0.0, 1.0, 1.0)
        answer = await listed(system)
        assert (names(answer), answer["of_newest"]) == (["new"], 3)
