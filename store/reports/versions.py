"""Compares policy versions: which came from which, and their rewards by task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.json_text import dumps
from ...core.records import Mode, VersionStatus
from ..database import Database
from ..rollouts import read_rollout
from ..trust import COUNTS_AS_IT_IS, HAS_REWARD_THAT_COUNTS, OPENED_BY_ONE_THAT_COUNTS, Trust

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

_OF_VERSIONS = "policy_version IN (SELECT CAST(value AS BIGINT) FROM json_each(:versions)) AND foreign_calls = 0"
_BY_TASK = f"""
SELECT policy_version, mode, task_id, AVG(reward) AS mean, COUNT(*) AS rollouts, AVG(reward * reward) AS square
FROM {{rollouts}} WHERE {_OF_VERSIONS} AND reward IS NOT NULL AND {{counts}} GROUP BY policy_version, mode, task_id
"""
REWARDS_BY_TASK = _BY_TASK.format(rollouts="rollouts", counts="TRUE")
REWARDS_BY_TASK_THAT_COUNT = _BY_TASK.format(rollouts="rollouts", counts=COUNTS_AS_IT_IS)
_OF_KEY = "(SELECT * FROM rollouts WHERE key_id = :key_id ORDER BY n DESC LIMIT 20000) AS recent"
REWARDS_BY_TASK_OF_KEY = _BY_TASK.format(rollouts=_OF_KEY, counts="TRUE")
# Those whose rewards count in part, the newest.
COUNTING_IN_PART = f"""
SELECT * FROM rollouts WHERE {_OF_VERSIONS} AND reward IS NOT NULL
    AND {HAS_REWARD_THAT_COUNTS} AND NOT {COUNTS_AS_IT_IS} ORDER BY n DESC LIMIT 10000
"""
# On a held-out task, a program that failed has earned nothing, unless all of them failed.
FAILED_HELD_OUT = f"""
SELECT policy_version, mode, task_id, COUNT(*) AS rollouts FROM rollouts
WHERE mode = 'eval' AND status = 'failed' AND {_OF_VERSIONS} AND reward IS NULL AND task_id IS NOT NULL
    AND (key_id = :key_id OR (:key_id IS NULL AND {OPENED_BY_ONE_THAT_COUNTS}))
GROUP BY policy_version, mode, task_id
"""
COSTS_BY_TASK = f"""
SELECT policy_version, mode, task_id, AVG(CAST(tokens AS DOUBLE PRECISION)) AS tokens,
    AVG((SELECT AVG(latency_ms) FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.status = 'ok'))
    AS latency_ms
FROM rollouts WHERE {_OF_VERSIONS} AND reward IS NOT NULL AND (:key_id IS NULL OR key_id = :key_id)
GROUP BY policy_version, mode, task_id
"""
FEW = 6  # makes the variance of few tasks larger, as Student's t has longer tails


class Ancestor(NamedTuple):
    """A version in a line of versions. `base`: the one before it; None for one that no step made."""

    version: int
    base: int | None
    status: VersionStatus
    created_at: float


class TaskMean(NamedTuple):
    """The mean reward, and the mean of its square, of so many rollouts of a task that began with a version.

    Without a task: of all such rollouts. `tokens`: sampled in a rollout, on average; `latency_ms`: of a rollout's
    calls. None where they were not asked for.
    """

    version: int
    mode: Mode
    task_id: str | None
    mean: float
    rollouts: int
    square: float
    tokens: float | None = None
    latency_ms: float | None = None


@dataclass(frozen=True, slots=True)
class MeanReward:
    """The mean reward over tasks, which have so many rollouts. Rollouts without a task count as a task each."""

    mean: float
    rollouts: int


@dataclass(frozen=True, slots=True)
class VersionReward(MeanReward):
    """The reward of a version: the same number wherever it is shown. `low`, `high`: its 95 % interval, if one is known.

    The interval is over tasks, or over the rollouts of a single one.
    """

    low: float | None
    high: float | None

    @classmethod
    def of(cls, means: Sequence[TaskMean]) -> VersionReward:
        """Return the reward of a version in one mode. `means`: of all its tasks, at least one."""
        rollouts, alone = sum(one.rollouts for one in means), len(means) == 1
        units = [(one, one.rollouts if one.task_id is None or alone else 1) for one in means]
        count = sum(n for _, n in units)
        mean = means[0].mean if alone else math.fsum(n * one.mean for one, n in units) / count
        if count == 1:
            return cls(mean, rollouts, None, None)
        # A task counts by its mean; one by one, rollouts spread around theirs.
        squares = math.fsum(n * ((one.mean - mean) ** 2 + (max(one.square - one.mean**2, 0) if n > 1 else 0))
                            for one, n in units)  # fmt: skip
        freedom = count - 1
        half = 1.96 * math.sqrt(squares / freedom / count * (freedom + FEW) / freedom)
        return cls(mean, rollouts, mean - half, mean + half)


class VersionReport:
    """Reads records about versions beside their own."""

    def __init__(self, database: Database, trust: Trust) -> None:
        self._db = database
        self._trust = trust

    async def parents(self) -> dict[int, int]:
        """Return, by version, the version that its training step started from; the base model has none."""
        return {row["version"]: row["base"] for row in await self._db.all(PARENTS)}

    async def line(self, version: int, until: int, since: float) -> list[Ancestor]:
        """Return a version and those that it was trained on from, newest first, as far back as `until`.

        The first that was taken back, or was made before `since` (Unix time), is the last.
        """
        rows = await self._db.all(LINE, {"version": version, "until": until, "since": since})
        return [Ancestor(*row) for row in rows]

    async def rewards(self, versions: Iterable[int], key_id: str | None = None) -> dict[tuple[str, int], VersionReward]:
        """Return the rewards of versions, by mode and version. `key_id` as in `task_means`."""
        found: dict[tuple[str, int], list[TaskMean]] = {}
        for one in await self.task_means(versions, key_id):
            found.setdefault((one.mode, one.version), []).append(one)
        return {which: VersionReward.of(means) for which, means in found.items()}

    async def task_means(
        self, versions: Iterable[int], key_id: str | None = None, *, costs: bool = False
    ) -> list[TaskMean]:
        """Return the rewards of rollouts that began with versions, by version, mode and task.

        Those that act on everybody (`trust.py`); with `key_id`, of the newest that were opened with this key. Rollouts
        that another model answered do not count. With `costs`, also their tokens and latency.
        """
        params = {"versions": dumps([*versions]), "key_id": key_id} | await self._trust.params()
        counts = REWARDS_BY_TASK_OF_KEY
        if key_id is None:
            is_all = await self._trust.whose() == "everybody's"
            counts = REWARDS_BY_TASK if is_all else REWARDS_BY_TASK_THAT_COUNT
        found = [TaskMean(*row) for row in await self._db.all(counts, params)]
        if counts == REWARDS_BY_TASK_THAT_COUNT:
            rollouts = [read_rollout(row) for row in await self._db.all(COUNTING_IN_PART, params)]
            returns = await self._trust.returns(rollouts)
            found += [
                TaskMean(one.policy_version or 0, one.mode, one.task_id, value, 1, value**2)
                for one in rollouts
                if (value := returns.get(one.rollout_id)) is not None
            ]
        evaluated = {one.version for one in found if one.mode == "eval"}
        failed = await self._db.all(FAILED_HELD_OUT, params) if evaluated else ()
        found += [
            TaskMean(row["policy_version"], "eval", row["task_id"], 0.0, row["rollouts"], 0.0)
            for row in failed
            if row["policy_version"] in evaluated
        ]
        joined: dict[tuple[Any, ...], TaskMean] = {}
        for one in found:
            known = joined.get(one[:3])
            joined[one[:3]] = one if known is None else _joined(known, one)
        for row in await self._db.all(COSTS_BY_TASK, params) if costs else ():
            if (which := tuple(row)[:3]) in joined:
                joined[which] = joined[which]._replace(tokens=row["tokens"], latency_ms=row["latency_ms"])
        return [*joined.values()]


def _joined(one: TaskMean, other: TaskMean) -> TaskMean:
    rollouts = one.rollouts + other.rollouts
    mean = (one.mean * one.rollouts + other.mean * other.rollouts) / rollouts
    square = (one.square * one.rollouts + other.square * other.rollouts) / rollouts
    return one._replace(mean=mean, rollouts=rollouts, square=square)
