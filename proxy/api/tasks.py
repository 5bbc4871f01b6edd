"""`GET /tasks`: the tasks of the newest rollouts, with their rewards over time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

from fastapi import APIRouter

from ...core.records import Mode
from ...core.statistics import mean_and_spread
from ...store.reports import TaskRollout, TaskSum
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
    store, key_id, first = request.parts.store, request.caller.sight.key_id, position or 0
    filters: dict[str, Any] = {name: value for name, value in (("mode", mode), ("key_id", key_id)) if value is not None}
    compared = await store.tasks.sums(filters)
    looked_at = compared if task_id is None else await store.tasks.sums(filters | {"task_id": task_id})
    sums = [task for task in looked_at if task.task_id is not None]
    following, shown = str(first + limit) if first + limit < len(sums) else None, slice(first, first + limit)
    # Of equals, and of tasks without a reward, which come last, the one with the newest rollout is first.
    if sort == "rollouts":
        sums.sort(key=lambda task: -task.rollouts)
    if sort in ("recent", "rollouts"):
        sums = sums[shown]
    rollouts = await store.tasks.rollouts(sums, mode, key_id)
    tasks = await asyncio.to_thread(tasks_seen, sums, rollouts, compared)
    if sort in ("mean", "spread"):
        by = "mean" if sort == "mean" else "std"
        tasks = sorted(tasks, key=lambda task: -getattr(task, by) if task.rewarded else float("inf"))[shown]
    return TaskPage(tasks, following, sum(task.rollouts for task in looked_at))


def tasks_seen(tasks: Iterable[TaskSum], newest: Iterable[TaskRollout], compared: Iterable[TaskSum]) -> list[TaskSeen]:
    """Return tasks in their order, with their rollouts (newest first).

    A task is `never` solved if each of its rewards is the lowest that any of `compared` has, and `always` if each is
    the highest. That holds on any scale of rewards; where all are equal, nobody can tell.
    """
    known = [task for task in compared if task.task_id is not None]
    lowest = min((task.low for task in known if task.low is not None), default=0.0)
    highest = max((task.high for task in known if task.high is not None), default=0.0)
    of_task = defaultdict[str | None, list[TaskRollout]](list)
    for rollout in newest:
        of_task[rollout.task_id].append(rollout)

    def seen(task: TaskSum) -> TaskSeen:
        rollouts = of_task[task.task_id]
        rewarded = [
            TaskReward(r.rollout_id, r.reward, r.at, r.mode, r.policy_version) for r in rollouts if r.reward is not None
        ]
        mean, spread = mean_and_spread([one.reward for one in rewarded]) if rewarded else (None, None)
        solved: Solved | None = "never" if task.high == lowest else "always" if task.low == highest else "sometimes"
        return TaskSeen(
            task_id=task.task_id or "", rollouts=len(rollouts), rewarded=len(rewarded), mean=mean, std=spread,
            min=task.low, max=task.high, solved=None if lowest == highest or task.low is None else solved,
            last_at=max(r.at for r in rollouts), recent=rewarded[:SHOWN][::-1],
        )  # fmt: skip

    return [seen(task) for task in tasks if task.task_id in of_task]
