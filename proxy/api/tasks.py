"""`GET /tasks`: the tasks of the newest rollouts, with their rewards over time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from ...core.statistics import mean_and_spread
from ...store.reports import TaskRollout, TaskSum
from .answers import ERRORS, TaskPage, answers
from .bodies import Cursor, Id
from .requests import AgentRoute, Limit, caller_of, large_response, parts_for_all, position_of

router = APIRouter(tags=["tasks"], responses=ERRORS, route_class=AgentRoute)

Sort = Literal["recent", "mean", "spread", "rollouts"]
Task = dict[str, Any]

SHOWN = 32  # rewards of a task
# The greatest first. Tasks without a reward come last, and of equals the one with the newest rollout first.
BY_SUM: dict[Sort, Callable[[TaskSum], float]] = {"recent": lambda task: 0.0, "rollouts": lambda task: -task.rollouts}
BY_REWARDS: dict[Sort, Callable[[Task], float]] = {
    "mean": lambda task: -task["mean"] if task["rewarded"] else float("inf"),
    "spread": lambda task: -task["std"] if task["rewarded"] else float("inf"),
}


@router.get("/tasks", response_model=None, responses=answers(TaskPage))
async def list_tasks(
    request: Request,
    mode: Literal["train", "eval"] | None = None,
    task_id: Id | None = None,
    sort: Sort = "recent",
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """The tasks of the newest 20,000 rollouts, a page at a time.

    `sort`: by the newest rollout, the mean reward, its standard deviation, or the number of rollouts, the greatest
    first. The cursor is a place in this order: what happens meanwhile may move a task from one page to another.
    """
    p, sight, first = await parts_for_all(request), caller_of(request).sight, position_of(cursor) or 0
    filters = {"mode": mode, "key_id": sight.key_id}
    of_all = {name: value for name, value in filters.items() if value is not None}
    of_task = of_all if task_id is None else of_all | {"task_id": task_id}
    looked_at = await p.store.tasks.sums(of_task)
    compared = looked_at if task_id is None else await p.store.tasks.sums(of_all)
    sums = [task for task in looked_at if task.task_id is not None]
    following = str(first + limit) if first + limit < len(sums) else None
    shown = slice(first, first + limit)
    if sort in BY_SUM:
        sums = sorted(sums, key=BY_SUM[sort])[shown]
    rollouts = await p.store.tasks.rollouts(sums, mode, sight.key_id)
    tasks = await asyncio.to_thread(task_views, sums, rollouts, compared)
    if sort in BY_REWARDS:
        tasks = sorted(tasks, key=BY_REWARDS[sort])[shown]
    page = {"data": tasks, "next_cursor": following, "of_newest": sum(task.rollouts for task in looked_at)}
    return await large_response(lambda: page)


def task_views(tasks: Iterable[TaskSum], newest: Iterable[TaskRollout], compared: Iterable[TaskSum]) -> list[Task]:
    """Return tasks as JSON, in their order, with their rollouts (newest first).

    A task is `never` solved if each of its rewards is the lowest that any of `compared` has, and `always` if each is
    the highest. That holds on any scale of rewards; where all are equal, nobody can tell.
    """
    bounds = [(task.low, task.high) for task in compared if task.task_id is not None]
    lowest = min((low for low, _ in bounds if low is not None), default=0.0)
    highest = max((high for _, high in bounds if high is not None), default=0.0)
    of_task: dict[str | None, list[TaskRollout]] = {task.task_id: [] for task in tasks}
    for rollout in newest:
        of_task[rollout.task_id].append(rollout)
    return [_task_view(task_id, rollouts, lowest, highest) for task_id, rollouts in of_task.items() if rollouts]


def _task_view(task_id: str | None, rollouts: Sequence[TaskRollout], lowest: float, highest: float) -> Task:
    rewarded = [(r, r.reward) for r in rollouts if r.reward is not None]
    rewards = [reward for _, reward in rewarded]
    mean, spread = mean_and_spread(rewards) if rewards else (None, None)
    return {
        "task_id": task_id,
        "rollouts": len(rollouts),
        "rewarded": len(rewards),
        "mean": mean,
        "std": spread,
        "min": min(rewards, default=None),
        "max": max(rewards, default=None),
        "solved": _solved(rewards, lowest, highest),
        "last_at": max(r.at for r in rollouts),
        "recent": [
            {
                "rollout_id": r.rollout_id,
                "reward": reward,
                "at": r.at,
                "mode": r.mode,
                "policy_version": r.policy_version,
            }
            for r, reward in reversed(rewarded[:SHOWN])
        ],
    }


def _solved(rewards: Sequence[float], lowest: float, highest: float) -> str | None:
    if not rewards or lowest == highest:
        return None
    if max(rewards) == lowest:
        return "never"
    return "always" if min(rewards) == highest else "sometimes"
