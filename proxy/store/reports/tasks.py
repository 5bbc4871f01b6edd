"""The newest rollouts as their tasks show them: rewards over time."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from ..database import Database
from ..rollouts import ROLLOUT_FILTERS

NEWEST = 20_000  # rollouts that are looked at
TASK_ROLLOUTS = """
SELECT rollout_id, task_id, mode, policy_version, reward, COALESCE(ended_at, created_at) AS at FROM rollouts
WHERE TRUE {filters}
ORDER BY n DESC LIMIT :limit
"""


class TaskRollout(NamedTuple):
    """A rollout as its task shows it. `at`: when it ended, or began if it has not ended (Unix time)."""

    rollout_id: str
    task_id: str | None
    mode: str
    policy_version: int | None
    reward: float | None
    at: float


class Tasks:
    """Reads rollouts by their tasks."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def newest(self, filters: dict[str, Any]) -> list[TaskRollout]:
        """Return the newest rollouts, at most `NEWEST`, newest first. Filters: mode, task_id, key_id."""
        statement = TASK_ROLLOUTS.format(filters=" ".join(ROLLOUT_FILTERS[name] for name in filters))
        rows = await self._db.all(statement, {**filters, "limit": NEWEST})
        return await asyncio.to_thread(lambda: [TaskRollout(*row) for row in rows])
