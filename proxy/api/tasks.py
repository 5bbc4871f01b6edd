"""`GET /tasks`: the tasks of the newest rollouts, with their rewards over time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter

from ...core.records import Mode
from ...core.statistics import mean_and_spread
from ...store.database import Row, read
from .answers import Solved, TaskPage, TaskReward, TaskSeen
from .bodies import Id
from .requests import ControlRequest, Limit, Position, UserRoute

router = APIRouter(tags=["tasks"], route_class=UserRoute)

SHOWN = 32  # rewards of a task


@router.get("/tasks")
async def list_tasks(
    request: ControlRequest,
    position: Position,
    mode: Mode | None = None,
    task_id: Id | None = None,
    sort: Literal["recent", "mean", "spread", "rollouts"] = "recent",
    limit: Limit = 100,
) -> TaskPage:
    """The tasks of the newest 20,000 rollouts, a page at a time.

    `sort`: by the newest rollout, the mean reward, its standard deviation, or the number of rollouts, the greatest
    first. The cursor is a place in this order: what happens meanwhile may move a task from one page to another.
    """
    reports, key_id, first = request.parts.store.reports, request.caller.sight.key_id, position or 0
    filters: dict[str, Any] = {name: value for name, value in (("mode", mode), ("key_id", key_id)) if value is not None}
    compared = await reports.newest_rollouts(filters)
    looked_at = compared if task_id is None else await reports.newest_rollouts(filters | {"task_id": task_id})
    tasks = await asyncio.to_thread(tasks_seen, looked_at, compared)
    # Of equals, and of tasks without a reward, which come last, the one with the newest rollout is first.
    if by := {"mean": "mean", "spread": "std", "rollouts": "rollouts"}.get(sort):
        tasks.sort(key=lambda task: float("inf") if getattr(task, by) is None else -getattr(task, by))
    following = str(first + limit) if first + limit < len(tasks) else None
    return TaskPage(tasks[first : first + limit], following, len(looked_at))


def tasks_seen(newest: Iterable[Row], compared: Iterable[Row]) -> list[TaskSeen]:
    """Return the tasks of rollouts, which come newest first, in the order of their newest ones.

    A task is `never` solved if each of its rewards is the lowest that any of `compared` has, and `always` if each is
    the highest. That holds on any scale of rewards; where all are equal, nobody can tell.
    """
    known = [row["reward"] for row in compared if row["task_id"] is not None and row["reward"] is not None]
    lowest, highest = min(known, default=0.0), max(known, default=0.0)
    of_task = defaultdict[str, list[Row]](list)
    for row in newest:
        if row["task_id"] is not None:
            of_task[row["task_id"]].append(row)

    def seen(task_id: str, rollouts: Sequence[Row]) -> TaskSeen:
        rewarded = [read(TaskReward, row) for row in rollouts if row["reward"] is not None]
        rewards = [one.reward for one in rewarded]
        mean, spread = mean_and_spread(rewards) if rewards else (None, None)
        low, high = min(rewards, default=None), max(rewards, default=None)
        solved: Solved | None = "never" if high == lowest else "always" if low == highest else "sometimes"
        return TaskSeen(
            task_id=task_id, rollouts=len(rollouts), rewarded=len(rewards), mean=mean, std=spread, min=low, max=high,
            solved=None if lowest == highest or not rewards else solved,
            last_at=max(row["at"] for row in rollouts), recent=rewarded[:SHOWN][::-1],
        )  # fmt: skip

    return [seen(task_id, rollouts) for task_id, rollouts in of_task.items()]
