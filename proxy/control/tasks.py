"""`GET /tasks`: the tasks of the newest rollouts, with their rewards over time. Contract, section 3."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from ..bootstrap import mean_and_spread
from ..store.reports.tasks import TaskRollout
from .answers import ERRORS, TaskPage, answers
from .bodies import Cursor, Id
from .door import AgentRoute
from .requests import Limit, caller_of, large_response, parts_for_all, position_of

router = APIRouter(tags=["tasks"], responses=ERRORS, route_class=AgentRoute)

Sort = Literal["recent", "mean", "spread", "rollouts"]
Task = dict[str, Any]

SHOWN = 32  # rewards of a task
# The greatest first. Tasks without a reward come last, and of equals the one with the newest rollout first.
ORDERS: dict[str, Callable[[Task], float]] = {
    "recent": lambda task: 0.0,
    "mean": lambda task: -task["mean"] if task["rewarded"] else float("inf"),
    "spread": lambda task: -task["std"] if task["rewarded"] else float("inf"),
    "rollouts": lambda task: -task["rollouts"],
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
    looked_at = await p.store.tasks.newest(of_all if task_id is None else of_all | {"task_id": task_id})
    compared = looked_at if task_id is None else await p.store.tasks.newest(of_all)
    tasks = await asyncio.to_thread(task_views, looked_at, compared)
    tasks.sort(key=ORDERS[sort])
    following = str(first + limit) if first + limit < len(tasks) else None
    page = {"data": tasks[first : first + limit], "next_cursor": following, "of_newest": len(looked_at)}
    return await large_response(lambda: page)


def task_views(newest: Sequence[TaskRollout], compared: Iterable[TaskRollout]) -> list[Task]:
    """Return the tasks of rollouts (newest first) as JSON, in the order of their newest rollouts.

    A task is `never` solved if each of its rewards is the lowest that any of `compared` has, and `always` if each is
    the highest. That holds on any scale of rewards; where all are equal, nobody can tell.
    """
    rewards = [r.reward for r in compared if r.task_id is not None and r.reward is not None]
    lowest, highest = min(rewards, default=0.0), max(rewards, default=0.0)
    tasks: dict[str, list[TaskRollout]] = {}
    for rollout in newest:
        if rollout.task_id is not None:
            tasks.setdefault(rollout.task_id, []).append(rollout)
    return [_task_view(task_id, rollouts, lowest, highest) for task_id, rollouts in tasks.items()]


def _task_view(task_id: str, rollouts: Sequence[TaskRollout], lowest: float, highest: float) -> Task:
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
