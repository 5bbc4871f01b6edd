"""The policy versions: their status, how they are published, their answers to probes, ancestry and rewards."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.errors import NotFound
from ..core.json_text import dumps
from ..core.records import Mode, PolicyVersion, PublishMode, VersionStatus
from .database import Database, Records, Transaction, read
from .rewards import FAILED_HELD_OUT

VERSION_LIVE_NOW = """
SELECT policy_versions.* FROM policy_versions
WHERE version = (SELECT version FROM policy_log ORDER BY n DESC LIMIT 1)
"""
VERSION_NEW = """
INSERT INTO policy_versions (version, status, publish, step, created_at, metrics)
SELECT MAX(version) + 1, 'publishing', :publish, :step, :at, :metrics FROM policy_versions
RETURNING version
"""
VERSION_VERIFIED = "UPDATE policy_versions SET verified = 1 WHERE version = :version"
GO_LIVE = (
    "INSERT INTO policy_log (version, at) VALUES (:version, :at)",
    "UPDATE policy_versions SET status = 'live', live_at = :at WHERE version = :version",
    "UPDATE policy_versions SET status = 'ready' WHERE status = 'live' AND version <> :version",
)
STEP_PUBLISHED = "UPDATE steps SET version = :version WHERE step = :step"
VERSION_FAILED = (
    "UPDATE policy_versions SET status = 'failed', error = :error WHERE version = :version",
    "UPDATE steps SET version = NULL WHERE step = (SELECT step FROM policy_versions WHERE version = :version)"
    " AND version = :version",
)
# Whoever makes a version live decides about the one that is tested.
VERSION_UNTESTED = "UPDATE policy_versions SET status = 'ready' WHERE status = 'candidate'"
# Of merged weights that another version took the place of. A live one may still be verified.
VERSIONS_NEVER_VERIFIED = """
SELECT version FROM policy_versions
WHERE status = 'failed' OR (status = 'ready' AND publish = 'merged' AND verified = 0)
"""
VERSION_BEFORE = """
SELECT * FROM policy_versions
WHERE version < :version AND status = 'ready' AND live_at IS NOT NULL AND (path IS NOT NULL OR version = 0)
ORDER BY version DESC LIMIT 1
"""
PINNED_S = 3600.0  # a rollout that runs for longer may lose its version
PINNED_VERSIONS = """
SELECT DISTINCT policy_version FROM rollouts
WHERE status = 'running' AND policy_version IS NOT NULL AND created_at > :since
"""

DECIDED = "SELECT mode, decided_by, at FROM publishing WHERE n = 1"
NEWEST_CHECKPOINT = """
SELECT checkpoint FROM steps WHERE checkpoint IS NOT NULL
    AND EXISTS (SELECT 1 FROM policy_versions WHERE publish IS NOT NULL) ORDER BY step DESC LIMIT 1
"""
DECIDE = """
INSERT INTO publishing (n, mode, decided_by, at) VALUES (1, :mode, :by, :at)
ON CONFLICT (n) DO UPDATE SET mode = excluded.mode, decided_by = excluded.decided_by, at = excluded.at
WHERE :asked AND publishing.mode <> excluded.mode
"""

PROBE_FIRST = """
INSERT INTO probes (version, model, answer, at) VALUES (:version, :model, :answer, :at)
ON CONFLICT (version) DO UPDATE SET model = excluded.model, answer = excluded.answer, at = excluded.at, problem = NULL
WHERE probes.model <> excluded.model
"""

PARENTS = "SELECT policy_versions.version, steps.base FROM policy_versions JOIN steps USING (step)"
_BY_TASK = """
SELECT policy_version AS version, mode, task_id, AVG({value}) AS mean, COUNT(*) AS rollouts,
    AVG({value} * {value}) AS square, COUNT(reward) AS rewarded, NULL AS tokens, NULL AS latency_ms FROM {rollouts}
WHERE policy_version IN (SELECT CAST(value AS BIGINT) FROM json_each(:versions)) AND foreign_calls = 0
    AND COALESCE(reward, {value}) IS NOT NULL AND {value} IS NOT NULL GROUP BY policy_version, mode, task_id
"""
REWARDS_BY_TASK = _BY_TASK.format(value="trusted_reward", rollouts="rollouts AS recent")
REWARDS_BY_TASK_OF_KEY = _BY_TASK.format(
    value="earned",
    rollouts=f"""
    (SELECT rollouts.*, COALESCE(reward, CASE WHEN {FAILED_HELD_OUT} THEN 0.0 END) AS earned
     FROM rollouts WHERE key_id = :key_id ORDER BY n DESC LIMIT 20000) AS recent
""",
)
NO_COSTS = "NULL AS tokens, NULL AS latency_ms"
COSTS = """
AVG(CAST(tokens AS DOUBLE PRECISION)) AS tokens,
    AVG((SELECT AVG(latency_ms) FROM calls WHERE calls.rollout_id = recent.rollout_id AND calls.status = 'ok'))
    AS latency_ms
"""
FEW = 6  # makes the variance of few tasks larger, as Student's t has longer tails


class TaskMean(NamedTuple):
    """The mean reward and mean squared reward (`square`) of a task's rollouts that began with this version.

    `task_id` is None for all rollouts without a task. `rewarded`: how many rollouts have a reward; the others failed.
    `tokens`: mean sampled tokens per rollout; `latency_ms`: mean latency of a rollout's calls; None if not requested.
    """

    version: int
    mode: Mode
    task_id: str | None
    mean: float
    rollouts: int
    square: float
    rewarded: int
    tokens: float | None = None
    latency_ms: float | None = None


class Decided(NamedTuple):
    """The publishing mode, the process (trainer or proxy) that decided it, and when (Unix time)."""

    mode: PublishMode
    decided_by: str
    at: float


class Probed(NamedTuple):
    """A version's first `answer` to a probe while it was called `model` (proxy/gateway/routing.py).

    `problem`: how its newest answer differs, if it does; `at`: the Unix time of its newest answer.
    """

    model: str
    answer: list[Any]
    problem: str | None
    at: float


@dataclass(frozen=True, slots=True)
class MeanReward:
    """The mean reward over tasks, and the number of their rollouts. Each rollout without a task counts as a task."""

    mean: float
    rollouts: int


@dataclass(frozen=True, slots=True)
class VersionReward(MeanReward):
    """The mean reward of a version in one mode. `low`, `high`: its 95 % interval, if known.

    The interval is over tasks, or, if there is only one task, over its rollouts.
    """

    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, means: Sequence[TaskMean]) -> VersionReward:
        """Return the reward of a version in one mode. `means`: its `TaskMean`s, at least one."""
        rollouts = sum(one.rollouts for one in means)
        units = [1 if one.task_id is not None and len(means) > 1 else one.rollouts for one in means]
        count = sum(units)
        mean = math.fsum(n * one.mean for one, n in zip(means, units, strict=True)) / count
        if count == 1:
            return cls(mean, rollouts)
        squares, freedom = 0.0, count - 1
        for one, n in zip(means, units, strict=True):  # a task counts by its mean; rollouts spread around theirs
            squares += n * ((one.mean - mean) ** 2 + (n > 1) * max(one.square - one.mean**2, 0))
        half = 1.96 * math.sqrt(squares / freedom / count * (freedom + FEW) / freedom)
        return cls(mean, rollouts, mean - half, mean + half)


class PolicyVersions(Records):
    """The table of policy versions. `set_live` is the commit that moves the alias."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._live: tuple[int, PolicyVersion] | None = None  # since which row of the log; the version

    async def live(self) -> PolicyVersion:
        (version,) = await self._db.records(PolicyVersion, VERSION_LIVE_NOW)
        return version

    async def live_now(self) -> PolicyVersion:
        """Return the live version, for routing. Fields that can change while it is live may be outdated."""
        since = await self._db.quick("SELECT MAX(n) AS n FROM policy_log")
        assert since is not None
        if self._live is None or self._live[0] != since["n"]:
            row = await self._db.quick(VERSION_LIVE_NOW)
            assert row is not None
            self._live = since["n"], read(PolicyVersion, row)
        return self._live[1]

    async def _where(self, condition: str, **params: object) -> list[PolicyVersion]:
        statement = f"SELECT * FROM policy_versions WHERE {condition} ORDER BY version"
        return await self._db.records(PolicyVersion, statement, **params)

    async def all(self) -> list[PolicyVersion]:
        return await self._where("TRUE")

    async def is_new(self) -> bool:
        return await self._db.one("SELECT 1 FROM policy_versions WHERE publish IS NOT NULL LIMIT 1") is None

    async def get(self, version: int) -> PolicyVersion:
        if found := await self._where("version = :version", version=version):
            return found[0]
        raise NotFound(f"no policy version {version}", param="version")

    async def named(self, model: str) -> int | None:
        """Return the version that has this name, or an adapter of this name, in vLLM; None if there is none."""
        # Adapters of agents are served under the version's own name with a point and theirs.
        names = [model, *(model[: point.start()] for point in re.finditer(r"\.", model))]
        served = "served_model IN (SELECT CAST(value AS TEXT) FROM json_each(:names))"
        versions = await self._where(served, names=dumps(names))
        return next((one.version for one in versions if model in one.served_models), None)

    async def with_files(self) -> list[PolicyVersion]:
        return await self._where("path IS NOT NULL")

    async def of_status(self, status: VersionStatus) -> list[PolicyVersion]:
        return await self._where("status = :status", status=status)

    async def never_verified(self) -> frozenset[int]:
        """Return the versions that failed, and those whose merged weights were replaced before they were verified."""
        return frozenset(version for (version,) in await self._db.all(VERSIONS_NEVER_VERIFIED))

    async def to_serve(self, pinned: Iterable[int]) -> list[PolicyVersion]:
        """Return the live, candidate and `pinned` versions that have files, ordered by number."""
        wanted = {*pinned}
        return [v for v in await self.with_files() if v.status in ("live", "candidate") or v.version in wanted]

    async def before(self, version: int) -> PolicyVersion | None:
        """Return the newest earlier version that was live and can be live again; None if there is none."""
        return await self._db.record(PolicyVersion, VERSION_BEFORE, version=version)

    async def new(self, publish: PublishMode, step: int, metrics: dict[str, Any]) -> int:
        row = {"publish": publish, "step": step, "at": time.time(), "metrics": dumps(metrics)}
        ((version,),) = await self._db.write(lambda db: db.all(VERSION_NEW, row))
        return int(version)

    async def reserve(self, versions: Iterable[int]) -> None:
        """Reserve the numbers of versions that imported rollouts were sampled from."""
        other = "INSERT INTO policy_versions (version, status, created_at) VALUES (:version, 'ready', :at)"
        rows = [{"version": version, "at": time.time()} for version in versions]
        await self._db.commit([(f"{other} ON CONFLICT DO NOTHING", rows)])

    async def saved(
        self, version: int, path: str, served_model: str | None, adapters: Mapping[str, str] | None = None
    ) -> None:
        """Store where a version's files are, and what the version and its agents' adapters are called in vLLM."""
        statement = (
            "UPDATE policy_versions SET path = :path, served_model = :served_model, adapters = :adapters"
            " WHERE version = :version"
        )
        row = {"version": version, "path": path, "served_model": served_model, "adapters": dumps(adapters or {})}
        await self._db.commit([(statement, [row])])

    async def set_live(self, version: int, step: int | None = None, *, verified: bool = False) -> None:
        """Make the version live: the alias refers to it from now on. If a candidate was being tested, its test ends."""
        statements = [VERSION_UNTESTED, *GO_LIVE, *([VERSION_VERIFIED] if verified else ()), STEP_PUBLISHED]

        async def alone(db: Transaction) -> None:  # or two at once could both be left live
            for statement in statements:
                await db.all(statement, {"version": version, "at": time.time(), "step": step})

        await self._db.write(alone)

    async def verified(self, version: int) -> None:
        await self._db.execute(VERSION_VERIFIED, version=version)

    async def failed(self, version: int, error: str) -> None:
        """Note why the version could not go live or stay live. It never goes live again."""
        row = {"version": version, "error": error}
        await self._db.commit([(statement, [row]) for statement in VERSION_FAILED])

    async def forget_unfinished(self, version: int) -> None:
        unfinished = "DELETE FROM policy_versions WHERE version = :version AND status = 'publishing'"
        await self._db.execute(unfinished, version=version)

    async def forget_files(self, version: int) -> None:
        """Note that the version's files are gone: it cannot be promoted any more."""
        await self._db.execute("UPDATE policy_versions SET path = NULL WHERE version = :version", version=version)

    async def pinned(self, since: float) -> set[int]:
        """Return the versions that the running rollouts opened after `since` (Unix time) began with."""
        return {version for (version,) in await self._db.all(PINNED_VERSIONS, {"since": since})}

    async def parents(self) -> dict[int, int]:
        """Return the parent of each version that has a training step: the version that the step started from."""
        return dict(map(tuple, await self._db.all(PARENTS)))

    async def rewards(self, versions: Iterable[int], key_id: str | None = None) -> dict[tuple[str, int], VersionReward]:
        """Return the mean rewards of versions, by mode and version. `key_id` is as in `task_means`."""
        found = defaultdict[tuple[str, int], list[TaskMean]](list)
        for one in await self.task_means(versions, key_id):
            found[one.mode, one.version].append(one)
        return {which: VersionReward.of(means) for which, means in found.items()}

    async def task_means(
        self, versions: Iterable[int], key_id: str | None = None, *, costs: bool = False
    ) -> list[TaskMean]:
        """Return the mean rewards of rollouts, by the version that they began with, mode and task.

        These are trusted rewards (`rewards.py`) or, with `key_id`, all rewards of this key's newest rollouts. Rollouts
        that another model answered do not count. With `costs`, tokens and latency are included.
        """
        statement = REWARDS_BY_TASK if key_id is None else REWARDS_BY_TASK_OF_KEY
        statement = statement.replace(NO_COSTS, COSTS) if costs else statement
        found = await self._db.records(TaskMean, statement, versions=dumps([*versions]), key_id=key_id)
        # Where no held-out rollout has a reward, it is not the policy that failed.
        evaluated = {one.version for one in found if one.mode == "eval" and one.rewarded}
        return [one for one in found if one.mode != "eval" or one.version in evaluated]

    async def mode(self) -> Decided | None:
        return await self._db.record(Decided, DECIDED)

    async def decide_mode(self, mode: PublishMode, by: str, *, configured: bool) -> None:
        """Store this mode if none is stored yet, or if it is `configured`. Otherwise the stored mode stays."""
        await self._db.execute(DECIDE, mode=mode, by=by, asked=configured, at=time.time())

    async def probed(self, version: int) -> Probed | None:
        return await self._db.record(Probed, "SELECT * FROM probes WHERE version = :version", version=version)

    async def keep_answer(self, version: int, model: str, answer: list[Any]) -> None:
        """Store the version's first answer under this name, unless one is stored already."""
        await self._db.execute(PROBE_FIRST, version=version, model=model, answer=dumps(answer), at=time.time())

    async def keep_problem(self, version: int, problem: str | None) -> None:
        """Store the time and the result of the newest comparison with the first answer."""
        statement = "UPDATE probes SET problem = :problem, at = :at WHERE version = :version"
        await self._db.execute(statement, version=version, problem=problem, at=time.time())
