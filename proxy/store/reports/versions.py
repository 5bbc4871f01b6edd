"""Compares policy versions: which came from which, and their rewards by task."""

from __future__ import annotations

from typing import NamedTuple

from ...types import Mode, VersionStatus
from ..database import Database

PARENTS = """
SELECT policy_versions.version, steps.base FROM policy_versions JOIN steps ON steps.step = policy_versions.step
"""
# From a version back to the versions that it was trained on from, as far as the second one, and no older ones.
LINE = """
WITH RECURSIVE line (version, step, base, status, created_at) AS (
    SELECT version, step, (SELECT base FROM steps WHERE steps.step = policy_versions.step), status, created_at
    FROM policy_versions WHERE version = :version
    UNION
    SELECT older.version, older.step, (SELECT base FROM steps WHERE steps.step = older.step), older.status,
           older.created_at
    FROM line JOIN policy_versions AS older ON older.version = line.base
    WHERE line.version > :until AND line.created_at >= :since AND line.status NOT IN ('rejected', 'failed')
)
SELECT version, base, status, created_at FROM line
"""

_BY_TASK = """
FROM rollouts WHERE policy_version IN (:a, :b) AND reward IS NOT NULL AND foreign_calls = 0 AND task_id IS NOT NULL
    AND (:key_id IS NULL OR key_id = :key_id)
GROUP BY policy_version, mode, task_id
"""
REWARDS_BY_TASK = f"""
SELECT policy_version, mode, task_id, AVG(reward) AS mean, COUNT(*) AS rollouts, NULL AS tokens, NULL AS latency_ms
{_BY_TASK}
"""
COSTS_BY_TASK = f"""
SELECT policy_version, mode, task_id, AVG(reward) AS mean, COUNT(*) AS rollouts,
    AVG(CAST(tokens AS DOUBLE PRECISION)) AS tokens,
    AVG((SELECT AVG(latency_ms) FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.status = 'ok'))
    AS latency_ms
{_BY_TASK}
"""


class Ancestor(NamedTuple):
    """A version in a line of versions. `base`: the one before it; None for one that no step made."""

    version: int
    base: int | None
    status: VersionStatus
    created_at: float


class TaskMean(NamedTuple):
    """The mean reward of so many rollouts of a task that began with a version.

    `tokens`: sampled in a rollout, on average; `latency_ms`: of a rollout's calls. None where they were not asked for.
    """

    version: int
    mode: Mode
    task_id: str
    mean: float
    rollouts: int
    tokens: float | None
    latency_ms: float | None


class VersionReport:
    """Reads records about versions beside their own."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def parents(self) -> dict[int, int]:
        """Return, by version, the version that its training step started from; the base model has none."""
        return {row["version"]: row["base"] for row in await self._db.all(PARENTS)}

    async def line(self, version: int, until: int, since: float) -> list[Ancestor]:
        """Return a version and those that it was trained on from, newest first, as far back as `until`.

        The first that was taken back, or was made before `since` (Unix time), is the last.
        """
        rows = await self._db.all(LINE, {"version": version, "until": until, "since": since})
        return [Ancestor(*row) for row in rows]

    async def rewards_by_task(
        self, a: int, b: int, key_id: str | None = None, *, costs: bool = False
    ) -> list[TaskMean]:
        """Return the rewards of rollouts that began with two versions, by version, mode and task.

        With `key_id`, only those that were opened with this key. Rollouts that another model answered do not count.
        With `costs`, also their tokens and latency.
        """
        rows = await self._db.all(COSTS_BY_TASK if costs else REWARDS_BY_TASK, {"a": a, "b": b, "key_id": key_id})
        return [TaskMean(*row) for row in rows]
