"""Keeps evaluations of policy versions on held-out tasks, and which version is the best of those that can be served."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...core.json_text import dumps, loads
from ...store.rewards import OPENED_BY_TRUSTED
from ...store.store import Store

BEGIN = """
INSERT INTO evaluations (version, step, began_at) VALUES (:version, :step, :at)
ON CONFLICT (version) DO UPDATE SET began_at = excluded.began_at
"""
RESULT = ("error", "reward", "low", "high", "difference", "difference_low", "difference_high", "tasks", "rollouts",
          "failed")  # fmt: skip
ENDED = f"""
UPDATE evaluations SET ended_at = :at, by_task = :by_task, {", ".join(f"{name} = :{name}" for name in RESULT)}
WHERE version = :version
"""
FIRST = "SELECT version, by_task FROM evaluations WHERE reward IS NOT NULL ORDER BY step LIMIT 1"
LAST = "SELECT * FROM evaluations ORDER BY step DESC LIMIT 1"
OF_VERSIONS = "SELECT * FROM evaluations WHERE version IN (SELECT CAST(value AS BIGINT) FROM json_each(:versions))"
# That went live, and were seen to be served where their weights took others' place (`VERSIONS_NEVER_VERIFIED`).
SERVABLE = """
SELECT version FROM policy_versions INDEXED BY policy_versions_with_files WHERE path IS NOT NULL AND live_at IS NOT NULL
    AND (status = 'live' OR (status = 'ready' AND (publish = 'lora' OR verified = 1)))
"""
# Rollouts of training that were opened, or made a call, lately.
AT_WORK = """
SELECT 1 FROM rollouts WHERE status = 'running' AND mode = 'train' AND (created_at > :since OR EXISTS (
    SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.started_at > :since
)) LIMIT 1
"""
# Versions with held-out rollouts that were opened lately and have not ended; those of a killed trainer are begun anew.
UNDER_WAY = f"""
SELECT DISTINCT policy_version AS version FROM rollouts
WHERE status = 'running' AND mode = 'eval' AND task_id IS NOT NULL AND policy_version IS NOT NULL
    AND created_at > :since AND {OPENED_BY_TRUSTED}
    AND NOT EXISTS (SELECT 1 FROM evaluations WHERE version = policy_version AND began_at > rollouts.created_at)
"""
LATELY_S = 3600.0
ENOUGH = 8  # rollouts of training that a version is judged by, if any has so many


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
    """The best version that can be served, `judged` by held-out rollouts, or without any by those of training.

    `story` says it to people.
    """

    version: int
    judged: Literal["evaluation", "reward"]
    reward: float
    low: float | None = None
    high: float | None = None
    story: str = field(init=False)

    def __post_init__(self) -> None:
        what = "held-out" if self.judged == "evaluation" else "training"
        interval = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f})"
        object.__setattr__(self, "story", f"version {self.version}: {what} reward {self.reward:.3f}{interval}")


class Evaluations:
    """The table of evaluations (`evaluation`), one a version, which the trainer alone writes; and the best version."""

    def __init__(self, store: Store) -> None:
        self._store, self._db = store, store.database

    async def all(self) -> dict[int, HeldOut]:
        """Return the evaluations by version, with the rewards that their versions have by now."""
        stored = await self._db.records(HeldOut, "SELECT * FROM evaluations ORDER BY step")
        return {one.version: one for one in await self.with_rewards(stored)}

    async def with_rewards(self, stored: Sequence[HeldOut]) -> list[HeldOut]:
        """Return evaluations with the rewards that their versions have by now."""
        rewards = await self._store.versions.rewards([one.version for one in stored if one.reward is not None])
        now = [(one, rewards.get(("eval", one.version))) for one in stored]
        return [replace(one, reward=seen.mean, low=seen.low, high=seen.high) if seen else one for one, seen in now]

    async def of(self, version: int) -> HeldOut | None:
        """Return a version's evaluation; None without one."""
        return await self._db.record(HeldOut, "SELECT * FROM evaluations WHERE version = :version", version=version)

    async def last(self) -> HeldOut | None:
        """Return the evaluation of the newest version that has one; None without any."""
        return await self._db.record(HeldOut, LAST)

    async def first(self) -> tuple[int, dict[str, float]] | None:
        """Return the first version that has a result, with the mean reward of each task; None without any."""
        row = await self._db.one(FIRST)
        return None if row is None else (row["version"], loads(row["by_task"]))

    async def begin(self, version: int, step: int) -> None:
        """Note that an evaluation begins, or begins anew."""
        await self._db.commit([(BEGIN, [{"version": version, "step": step, "at": time.time()}])])

    async def ended(self, version: int, by_task: Mapping[str, float], **result: float | str | None) -> None:
        """Keep the result of an evaluation, by the names of `HeldOut`, or its `error`; and the mean of each task."""
        row = dict.fromkeys(RESULT) | result | {"version": version, "at": time.time(), "by_task": dumps({**by_task})}
        await self._db.commit([(ENDED, [row])])

    async def forget_broken_off(self, live: int) -> None:
        """Delete what a killed trainer left under way, but for the live version's."""
        statement = "DELETE FROM evaluations WHERE version <> :live AND ended_at IS NULL"
        await self._db.commit([(statement, [{"live": live}])])

    async def agents_work(self, since: float) -> bool:
        """Return whether a running rollout of training was opened, or made a call, after `since` (Unix time)."""
        return await self._db.one(AT_WORK, {"since": since}) is not None

    async def under_way(self) -> set[int]:
        """Return the versions that are being evaluated: while training goes on, or by `lightning-proxy eval`."""
        rows, last = await self._db.all(UNDER_WAY, {"since": time.time() - LATELY_S}), await self.last()
        return {row["version"] for row in rows} | ({last.version} if last and last.ended_at is None else set())

    async def best(self) -> Best | None:
        """Return the best version by the rewards that there are; None as long as none can be told.

        The one with the highest held-out reward (of equals, the oldest), if any has one and is not being evaluated
        now. Else the newest whose interval is not below that of another one. The reward of a version that was evaluated
        is that of all its held-out rollouts, as far as they are still there.
        """
        # The few versions that have files, and the base model.
        servable = [0, *sorted(row["version"] for row in await self._db.all(SERVABLE))]
        stored = await self._db.records(HeldOut, OF_VERSIONS, versions=dumps(servable))
        if servable == [0] and not stored:
            return None  # many rollouts may have begun with the base model
        rewards, being_evaluated = await self._store.versions.rewards(servable), await self.under_way()
        held_out = {one.version: (one.reward, one.low, one.high) for one in stored if one.reward is not None}
        held_out |= {v: (one.mean, one.low, one.high) for (mode, v), one in rewards.items() if mode == "eval"}
        judged = [version for version in servable if version in held_out.keys() - being_evaluated]
        if judged:
            version = max(judged, key=lambda one: held_out[one][0])
            return Best(version, "evaluation", *held_out[version])
        trained = [(version, one) for version in servable if (one := rewards.get(("train", version))) is not None]
        trained = [(version, one) for version, one in trained if one.rollouts >= ENOUGH] or trained
        most = max((one.low for _, one in trained if one.low is not None), default=-math.inf)
        found = [(version, one) for version, one in trained if one.high is None or one.high >= most]
        return next((Best(version, "reward", one.mean, one.low, one.high) for version, one in reversed(found)), None)
