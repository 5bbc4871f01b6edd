"""Keeps evaluations of policy versions on held-out tasks, and which version is the best of those that can be served."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from ..json_text import dumps, loads
from ..store.database import Database
from ..store.rows import read

BEGIN = """
INSERT INTO evaluations (version, step, began_at) VALUES (:version, :step, :at)
ON CONFLICT (version) DO UPDATE SET began_at = excluded.began_at
"""
ENDED = """
UPDATE evaluations SET ended_at = :at, reward = :reward, low = :low, high = :high, difference = :difference,
    difference_low = :difference_low, difference_high = :difference_high, tasks = :tasks, rollouts = :rollouts,
    failed = :failed, by_task = :by_task
WHERE version = :version
"""
FAILED = "UPDATE evaluations SET ended_at = :at, error = :error WHERE version = :version"
FIRST = "SELECT version, by_task FROM evaluations WHERE reward IS NOT NULL ORDER BY step LIMIT 1"
LAST = "SELECT * FROM evaluations ORDER BY step DESC LIMIT 1"
BEST = "SELECT version, judged, reward, low, high FROM best_version WHERE n = 1"
# That went live, and were seen to be served where their weights took others' place (`VERSIONS_NEVER_VERIFIED`).
SERVABLE = """
SELECT version FROM policy_versions WHERE path IS NOT NULL AND live_at IS NOT NULL
    AND (status = 'live' OR (status = 'ready' AND (publish = 'lora' OR verified = 1)))
"""
# Rollouts of training that were opened, or made a call, lately.
AT_WORK = """
SELECT 1 FROM rollouts WHERE status = 'running' AND mode = 'train' AND (created_at > :since OR EXISTS (
    SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.started_at > :since
)) LIMIT 1
"""
CHOOSE = """
INSERT INTO best_version (n, version, judged, reward, low, high) VALUES (1, :version, :judged, :reward, :low, :high)
ON CONFLICT (n) DO UPDATE SET version = excluded.version, judged = excluded.judged, reward = excluded.reward,
    low = excluded.low, high = excluded.high
"""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """An evaluation of a version on held-out tasks: mean reward over `tasks`, with its 95 % interval `low` to `high`.

    `difference`: how far it is above the first version that was evaluated, paired by task; null for that one.
    `ended_at` is null while it is under way; `error` says why it has no result. `step` made the version.
    """

    version: int
    step: int
    began_at: float
    ended_at: float | None = None
    error: str | None = None
    reward: float | None = None
    low: float | None = None
    high: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    tasks: int | None = None
    rollouts: int | None = None
    failed: int | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The best version that can be served, `judged` by evaluations, or without any by the smoothed training reward."""

    version: int
    judged: Literal["evaluation", "reward"]
    reward: float
    low: float | None = None
    high: float | None = None

    @property
    def story(self) -> str:
        """Return it for people."""
        if self.judged == "reward":
            return f"version {self.version}: smoothed training reward {self.reward:.3f}"
        return f"version {self.version}: held-out reward {self.reward:.3f} ({self.low:.3f} to {self.high:.3f})"


class Evaluations:
    """The table of evaluations, one a version, and the row of the best version. The trainer alone writes them."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def all(self) -> dict[int, HeldOut]:
        """Return the evaluations by version."""
        rows = await self._db.all("SELECT * FROM evaluations ORDER BY step")
        return {row["version"]: read(HeldOut, row) for row in rows}

    async def of(self, version: int) -> HeldOut | None:
        """Return a version's evaluation; None without one."""
        row = await self._db.one("SELECT * FROM evaluations WHERE version = :version", {"version": version})
        return None if row is None else read(HeldOut, row)

    async def last(self) -> HeldOut | None:
        """Return the evaluation of the newest version that has one; None without any."""
        row = await self._db.one(LAST)
        return None if row is None else read(HeldOut, row)

    async def first(self) -> tuple[int, dict[str, float]] | None:
        """Return the first version that has a result, with the mean reward of each task; None without any."""
        row = await self._db.one(FIRST)
        return None if row is None else (row["version"], loads(row["by_task"]))

    async def begin(self, version: int, step: int) -> None:
        """Note that an evaluation begins, or begins anew."""
        await self._db.commit([(BEGIN, [{"version": version, "step": step, "at": time.time()}])])

    async def ended(self, found: HeldOut, by_task: Mapping[str, float]) -> None:
        """Keep the result of an evaluation, and the mean reward of each task."""
        await self._db.commit([(ENDED, [asdict(found) | {"at": time.time(), "by_task": dumps(dict(by_task))}])])

    async def failed(self, version: int, error: str) -> None:
        """Note why an evaluation has no result."""
        await self._db.commit([(FAILED, [{"version": version, "error": error, "at": time.time()}])])

    async def forget_broken_off(self, live: int) -> None:
        """Delete what a killed trainer left under way, but for the live version's."""
        statement = "DELETE FROM evaluations WHERE version <> :live AND ended_at IS NULL"
        await self._db.commit([(statement, [{"live": live}])])

    async def agents_work(self, since: float) -> bool:
        """Return whether a running rollout of training was opened, or made a call, after `since` (Unix time)."""
        return await self._db.one(AT_WORK, {"since": since}) is not None

    async def best(self) -> Best | None:
        """Return the best version, as it was last chosen; None if none was, or if it can no longer be served."""
        row = await self._db.one(BEST)
        return None if row is None or row["version"] not in await self._servable() else read(Best, row)

    async def choose(self, smoothed: Mapping[int, float]) -> Best | None:
        """Choose the best version anew. `smoothed`: training rewards, for when nothing was evaluated.

        The version that is the best by rewards so far keeps its own, where `smoothed` has none. Of equals, the oldest.
        """
        servable, before = await self._servable(), await self.best()
        known = {**({before.version: before.reward} if before else {}), **smoothed}
        by_reward = [Best(version, "reward", known[version]) for version in servable if version in known]
        found = [one for version in servable if (one := await self.of(version)) is not None and one.reward is not None]
        evaluated = [Best(one.version, "evaluation", one.reward or 0.0, one.low, one.high) for one in found]
        best = max(evaluated or by_reward, key=lambda one: one.reward, default=None)
        if best is not None and best != before:
            await self._db.commit([(CHOOSE, [asdict(best)])])
        return best

    async def _servable(self) -> list[int]:
        """The few versions that have files, and the base model."""
        return [0, *sorted(row["version"] for row in await self._db.all(SERVABLE))]
