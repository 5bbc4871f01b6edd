"""The newest rollouts as their tasks show them: rewards over time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...core.json_text import dumps
from ...core.records import Mode
from ..database import Database
from ..rollouts import ROLLOUT_FILTERS

NEWEST = 20_000  # rollouts that are looked at
TASK_SUMS = """
SELECT task_id, COUNT(*) AS rollouts, MIN(n) AS oldest, MIN(reward) AS low, MAX(reward) AS high FROM (
    SELECT n, task_id, reward FROM rollouts WHERE TRUE {filters} ORDER BY n DESC LIMIT :limit
) AS recent GROUP BY task_id ORDER BY MAX(n) DESC
"""
TASK_ROLLOUTS = """
SELECT rollout_id, task_id, mode, policy_version, reward, COALESCE(ended_at, created_at) AS at FROM rollouts
WHERE task_id IN (SELECT CAST(value AS TEXT) FROM json_each(:task_ids)) AND n >= :oldest
    AND (:mode IS NULL OR mode = :mode) AND (:key_id IS NULL OR key_id = :key_id)
ORDER BY n DESC
"""


class TaskSum(NamedTuple):
    """A task's share of the newest rollouts. `oldest`: its first one; `low`, `high`: of their rewards.

    `task_id` is None for all rollouts without a task.
    """

    task_id: str | None
    rollouts: int
    oldest: int
    low: float | None
    high: float | None


class TaskRollout(NamedTuple):
    """A rollout as its task shows it. `at`: when it ended, or began if it has not ended (Unix time)."""

    rollout_id: str
    task_id: str
    mode: str
    policy_version: int | None
    reward: float | None
    at: float


class Tasks:
    """Reads rollouts by their tasks."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def sums(self, filters: dict[str, Any]) -> list[TaskSum]:
        """Return the tasks of the newest `NEWEST` rollouts, in the order of their newest ones.

        Filters: mode, task_id, key_id.
        """
        statement = TASK_SUMS.format(filters=" ".join(ROLLOUT_FILTERS[name] for name in filters))
        rows = await self._db.all(statement, {**filters, "limit": NEWEST})
        return await asyncio.to_thread(lambda: [TaskSum(*row) for row in rows])

    async def rollouts(self, tasks: Sequence[TaskSum], mode: Mode | None, key_id: str | None) -> list[TaskRollout]:
        """Return the rollouts of some tasks, newest first, back to the first that any of them counts."""
        oldest = min((task.oldest for task in tasks), default=0)
        task_ids = dumps([task.task_id for task in tasks])
        params: dict[str, object] = {"task_ids": task_ids, "oldest": oldest, "mode": mode, "key_id": key_id}
        rows = await self._db.all(TASK_ROLLOUTS, params)
        return await asyncio.to_thread(lambda: [TaskRollout(*row) for row in rows])
