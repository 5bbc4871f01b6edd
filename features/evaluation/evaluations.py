"""Stores evaluations of policy versions on held-out tasks, and finds the best version that can be served."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

from ...core.json_text import dumps
from ...core.records import PolicyVersion
from ...store.rewards import OPENED_BY_TRUSTED
from ...store.store import Store

RESULT = ("error", "reward", "low", "high", "difference", "difference_low", "difference_high")
BEGIN = """
INSERT INTO evaluations (version, step, began_at) VALUES (:version, :step, :at)
ON CONFLICT (version) DO UPDATE SET began_at = excluded.began_at
"""
ENDED = f"""
UPDATE evaluations SET ended_at = :at, {", ".join(f"{name} = :{name}" for name in RESULT)}
WHERE version = :version
"""
DONE = "SELECT 1 FROM evaluations WHERE ended_at IS NOT NULL AND (version = :version OR step > :after) LIMIT 1"
ALL = "SELECT * FROM evaluations ORDER BY step"
LAST = "SELECT * FROM evaluations ORDER BY step DESC LIMIT 1"
OF_VERSIONS = "SELECT * FROM evaluations WHERE version IN (SELECT CAST(value AS BIGINT) FROM json_each(:versions))"
FIRST = "SELECT version FROM evaluations WHERE reward IS NOT NULL ORDER BY step LIMIT 1"
# That went live, and were seen to be served where their weights took others' place (`VERSIONS_NEVER_VERIFIED`).
SERVABLE = """
SELECT version FROM policy_versions INDEXED BY policy_versions_with_files WHERE path IS NOT NULL AND live_at IS NOT NULL
    AND (status = 'live' OR (status = 'ready' AND (publish = 'lora' OR verified = 1)))
"""
# Versions that are evaluated now, here or by `eval`; what a killed trainer left running is begun again.
UNDER_WAY = f"""
SELECT version FROM evaluations WHERE ended_at IS NULL
UNION SELECT policy_version FROM rollouts
WHERE status = 'running' AND mode = 'eval' AND task_id IS NOT NULL AND policy_version IS NOT NULL
    AND created_at > :since AND {OPENED_BY_TRUSTED}
    AND NOT EXISTS (SELECT 1 FROM evaluations WHERE version = policy_version AND began_at > rollouts.created_at)
"""
LATELY_S = 3600.0
ENOUGH = 8  # rollouts of training by which a version is judged, if any version has as many


@dataclass(frozen=True, slots=True)
class HeldOut:
    """An evaluation of a version on held-out tasks: the mean reward over tasks, with its 95 % interval.

    `difference`: from the first evaluated version's mean, paired by task; null for that version. `ended_at`: null while
    the evaluation runs; `error`: why it has no result. `step`: the training step that made the version.
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


@dataclass(frozen=True, slots=True)
class Best:
    """The best version that can be served, `judged` by held-out rollouts or else by training rollouts."""

    version: int
    judged: Literal["evaluation", "reward"]
    reward: float
    low: float | None
    high: float | None
    story: str


class Evaluations:
    def __init__(self, store: Store) -> None:
        self._store, self._db = store, store.database

    async def read(self, statement: str = ALL, **params: str) -> dict[int, HeldOut]:
        """Return evaluations by version, with their versions' current rewards."""
        stored = await self._db.records(HeldOut, statement, **params)
        rewards = await self._store.versions.rewards([one.version for one in stored if one.reward is not None])
        now = [(one, rewards.get(("eval", one.version))) for one in stored]
        read = [replace(one, reward=seen.mean, low=seen.low, high=seen.high) if seen else one for one, seen in now]
        return {one.version: one for one in read}

    async def is_due(self, live: PolicyVersion, every_steps: int) -> bool:
        """Return whether an evaluation is due: none has ended for this version or for the last `every_steps` steps."""
        after = (live.step or 0) - every_steps
        return await self._db.one(DONE, {"version": live.version, "after": after}) is None

    async def first(self) -> int | None:
        return await self._db.value(int, FIRST)

    async def begin(self, version: int, step: int) -> None:
        await self._db.execute(BEGIN, version=version, step=step, at=time.time())

    async def ended(self, version: int, **result: float | str | None) -> None:
        """Store the result of an evaluation (fields of `HeldOut`), or its `error`."""
        await self._db.execute(ENDED, version=version, at=time.time(), **dict.fromkeys(RESULT) | result)

    async def forget_broken_off(self) -> None:
        """Delete unfinished evaluations, which a stopped or killed trainer left."""
        await self._db.execute("DELETE FROM evaluations WHERE ended_at IS NULL")

    async def under_way(self) -> set[int]:
        return {row["version"] for row in await self._db.all(UNDER_WAY, {"since": time.time() - LATELY_S})}

    async def best(self) -> Best | None:
        """Return the version with the best held-out reward, or else one chosen by training rewards, or None."""
        servable = [0, *sorted(row["version"] for row in await self._db.all(SERVABLE))]  # the few that have files
        stored = await self.read(OF_VERSIONS, versions=dumps(servable))
        if servable == [0] and not stored:
            return None  # many rollouts may have begun with the base model
        rewards = await self._store.versions.rewards(servable)
        held_out = {v: (one.reward, one.low, one.high) for v, one in stored.items() if one.reward is not None}
        held_out |= {v: (one.mean, one.low, one.high) for (mode, v), one in rewards.items() if mode == "eval"}
        judged: Literal["evaluation", "reward"] = "evaluation"
        if evaluated := sorted(held_out.keys() - await self.under_way()):
            version = max(evaluated, key=lambda one: held_out[one][0])
            reward, low, high = held_out[version]
        else:
            trained = [(version, one) for version in servable if (one := rewards.get(("train", version))) is not None]
            trained = [(version, one) for version, one in trained if one.rollouts >= ENOUGH] or trained
            most = max((one.low for _, one in trained if one.low is not None), default=-math.inf)
            trained = [(version, one) for version, one in trained if one.high is None or one.high >= most]
            if not trained:
                return None
            judged, (version, newest) = "reward", trained[-1]
            reward, low, high = newest.mean, newest.low, newest.high
        interval = "" if low is None else f" ({low:.3f} to {high:.3f})"
        what = "held-out" if judged == "evaluation" else "training"
        return Best(version, judged, reward, low, high, f"version {version}: {what} reward {reward:.3f}{interval}")
