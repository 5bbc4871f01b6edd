"""The training steps: the rollouts that each step took, and its result.

Commit points: `claim` (the step owns its rollouts) and `trained` (a restart no longer releases them).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from ..core.json_text import dumps
from ..core.records import CollapseSign, PolicyVersion, Rollout
from .database import Database, Records, Transaction
from .rollouts import ALL
from .versions import PolicyVersions

STEP_NEW = """
INSERT INTO steps (step, status, base, created_at)
SELECT COALESCE(MAX(step), 0) + 1, 'claimed', :base, :at FROM steps
RETURNING step
"""
CLAIM = "UPDATE rollouts SET step = :step WHERE rollout_id = :rollout_id AND step IS NULL"
DROP = "UPDATE rollouts SET dropped = :reason, dropped_by = :step WHERE rollout_id = :rollout_id"
CREDIT_FORGET = """
DELETE FROM call_credit WHERE n = (SELECT n FROM rollouts WHERE rollout_id = :rollout_id AND step = :step)
"""
CREDIT = """
INSERT INTO call_credit (n, seq, step, "return", advantage, "row", placed)
SELECT n, :seq, :step, :returned, :advantage, :row, :placed
FROM rollouts WHERE rollout_id = :rollout_id AND step = :step
"""
GROUP_JOIN = """
UPDATE rollouts SET group_id = (SELECT n FROM rollouts WHERE rollout_id = :first)
WHERE rollout_id = :rollout_id AND group_id IS NULL
"""
STEP_TRAINED = """
UPDATE steps SET status = 'trained', checkpoint = :checkpoint, metrics = :metrics, finished_at = :at WHERE step = :step
"""
STEP_METRICS = "UPDATE steps SET metrics = :metrics WHERE step = :step"
STEP_RELEASE = (
    "DELETE FROM call_credit WHERE n IN (SELECT n FROM rollouts WHERE step = :step)",
    "UPDATE rollouts SET step = NULL WHERE step = :step",
    "UPDATE rollouts SET dropped = NULL, dropped_by = NULL WHERE dropped_by = :step",
    "DELETE FROM steps WHERE step = :step",
)
# Not the newest, nor checkpoints of versions that have files.
OLD_CHECKPOINTS = """
SELECT step, checkpoint FROM steps
WHERE checkpoint IS NOT NULL AND status = 'trained'
  AND step < (SELECT step FROM steps WHERE checkpoint IS NOT NULL AND status = 'trained'
              ORDER BY step DESC LIMIT 1 OFFSET :newer)
  AND NOT EXISTS (SELECT 1 FROM policy_versions WHERE policy_versions.version = steps.version AND path IS NOT NULL)
ORDER BY step
"""
# What was dropped is in no group any more: the others are not late.
OFFER_ALL = (
    "UPDATE rollouts SET group_id = NULL WHERE dropped IS NOT NULL AND group_id IS NOT NULL",
    "UPDATE rollouts SET step = NULL WHERE step IS NOT NULL",
)
# For a copy of a store: the training on the original does not count, and nobody asks its reward function.
FORGET_TRAINING = (
    "DELETE FROM reward_function",
    "DELETE FROM awaiting_rewards",
    "UPDATE rollouts SET step = NULL, dropped = NULL, dropped_by = NULL WHERE step IS NOT NULL OR dropped IS NOT NULL",
    "DELETE FROM call_credit",
    "DELETE FROM steps",
    "UPDATE policy_versions SET step = NULL, path = NULL, status = 'ready' WHERE version > 0",
)


@dataclass(frozen=True, slots=True)
class Step:
    """A training step. `base`: the policy version that it started from; `version`: the one that it published."""

    step: int
    status: str
    base: int
    version: int | None
    checkpoint: str | None
    created_at: float
    finished_at: float | None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallCredit:
    """How a step trains on a call. `returned`: the call's return.

    `row`: the index of the rollout's training row that contains the call, or None. `placed`: why the call is in that
    row or in none (trainer/rows/samples.py).
    """

    rollout_id: str
    seq: int
    returned: float
    advantage: float
    row: int | None
    placed: str


@dataclass(frozen=True, slots=True)
class Collapse:
    """Why training and publishing stopped at `at` (Unix time). They resume when somebody makes a version live.

    `sign`, `what`: the name of the sign that was seen, and its description. `live_at`: when the version that was live
    at that moment had gone live. `go_back_to`: the newest version before the sign that can be served, or else the
    oldest later one, or the base model. The last step's metrics store this as `collapse`.
    """

    sign: CollapseSign
    what: str
    at: float
    live_at: float | None
    go_back_to: int

    @classmethod
    def of(cls, last: Step | None, live: PolicyVersion) -> Collapse | None:
        """Return the collapse of the last step; None if there is none, or if a version was made live since."""
        stored = last.metrics.get("collapse") if last else None
        return cls(**stored) if stored and stored["live_at"] == live.live_at else None

    @property
    def story(self) -> str:
        """Return a text for people: the sign that was seen, its effect, and what to do."""
        return (
            f"{self.what}. Agents are served as before; nothing is trained or published until a version is made live "
            f"by hand: `lightning-proxy policy promote {self.go_back_to}` goes back"
        )


class TrainingSteps(Records):
    def __init__(self, database: Database, versions: PolicyVersions) -> None:
        super().__init__(database)
        self._versions = versions

    async def claim(
        self,
        rollout_ids: Sequence[str],
        base: int,
        dropped: Mapping[str, Sequence[str]] = MappingProxyType({}),
        groups: Sequence[Sequence[str]] = (),
        credit: Sequence[CallCredit] = (),
    ) -> int:
        """Give rollouts to a new step and return its number. `groups` and `dropped` are as in `drop`.

        Releasing the step undoes `dropped`. `credit` replaces what an earlier step credited the rollouts' calls with.
        """

        async def work(db: Transaction) -> int:
            ((step,),) = await db.all(STEP_NEW, {"base": base, "at": time.time()})
            for statement in (CLAIM, CREDIT_FORGET):
                await db.many(statement, [{"step": step, "rollout_id": rollout_id} for rollout_id in rollout_ids])
            await db.many(CREDIT, [asdict(call) | {"step": step} for call in credit])
            await _drop(db, dropped, groups, step)
            return int(step)

        return await self._db.write(work)

    async def drop(self, dropped: Mapping[str, Sequence[str]], groups: Sequence[Sequence[str]] = ()) -> None:
        """Mark rollouts as dropped: only a reward with `retrain` offers them again. `dropped`: ids by reason.

        `groups`: for each group, the ids of the siblings that were compared. Some of them may still be running.
        """
        await self._db.write(lambda db: _drop(db, dropped, groups, None))

    async def trained(self, step: int, checkpoint: str | None, metrics: dict[str, Any]) -> None:
        """Mark a step as trained, once its checkpoint is complete. A restart no longer releases its rollouts."""
        row = {"step": step, "checkpoint": checkpoint, "metrics": dumps(metrics), "at": time.time()}
        await self._db.commit([(STEP_TRAINED, [row])])

    async def release_unfinished(self) -> list[int]:
        """Undo the steps that a killed trainer left unfinished, and return their numbers."""

        async def work(db: Transaction) -> list[int]:
            steps = [step for (step,) in await db.all("SELECT step FROM steps WHERE status = 'claimed'")]
            for statement in STEP_RELEASE:
                await db.many(statement, [{"step": step} for step in steps])
            return steps

        return await self._db.write(work)

    async def end_epoch(self, step: int, metrics: dict[str, Any], offer: bool) -> None:
        """Atomically replace the metrics of an epoch's last step; if `offer`, also offer trained rollouts again."""
        ended = (STEP_METRICS, [{"step": step, "metrics": dumps(metrics)}])
        await self._db.commit([ended, *((statement, [{}]) for statement in OFFER_ALL if offer)])

    async def forget_all(self) -> None:
        """Forget all training and the paths of versions' files; then, in another transaction, make version 0 live."""
        await self._db.commit([(statement, [{}]) for statement in FORGET_TRAINING])
        await self._versions.set_live(0)

    async def rollouts_of(self, step: int) -> list[Rollout]:
        statement = "SELECT * FROM rollouts WHERE step = :step ORDER BY task_id, n"
        return await self._db.records(Rollout, statement, step=step)

    async def took_any(self) -> bool:
        return await self._db.one("SELECT 1 FROM rollouts WHERE step IS NOT NULL LIMIT 1") is not None

    async def under_way_since(self) -> float | None:
        """Return when the current step began (Unix time); None if there is none."""
        return await self._db.value(float, "SELECT MIN(created_at) FROM steps WHERE status = 'claimed'")

    async def _trained(self, rest: str, **params: object) -> list[Step]:
        return await self._db.records(Step, f"SELECT * FROM steps WHERE status = 'trained' {rest}", **params)

    async def all(self) -> list[Step]:
        return await self._trained("ORDER BY step")

    async def newest(self, limit: int, before: int | None = None, *, brief: bool = False) -> list[Step]:
        """Return the last `limit` finished steps, newest first; with `before`, only steps before that one.

        With `brief`, the metrics come without `reward_by_task`, their largest part.
        """
        rest = "AND step < :before ORDER BY step DESC LIMIT :limit"
        steps = await self._trained(rest, limit=limit, before=ALL if before is None else before)
        for step in steps if brief else ():
            step.metrics.pop("reward_by_task", None)
        return steps

    async def last(self) -> Step | None:
        return next(iter(await self.newest(1)), None)

    async def of_version(self, version: int) -> Step | None:
        statement = "SELECT * FROM steps WHERE step = (SELECT step FROM policy_versions WHERE version = :version)"
        return await self._db.record(Step, statement, version=version)

    async def collapse(self) -> Collapse | None:
        return Collapse.of(await self.last(), await self._versions.live())

    async def update_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        await self._db.execute(STEP_METRICS, step=step, metrics=dumps(metrics))

    async def old_checkpoints(self, keep: int) -> list[tuple[int, str]]:
        """Return step and path of all checkpoints except the newest `keep` and those of versions with files."""
        return [(step, path) for step, path in await self._db.all(OLD_CHECKPOINTS, {"newer": keep - 1})]

    async def forget_checkpoint(self, step: int) -> None:
        await self._db.execute("UPDATE steps SET checkpoint = NULL WHERE step = :step", step=step)


async def _drop(
    db: Transaction, dropped: Mapping[str, Sequence[str]], groups: Sequence[Sequence[str]], step: int | None
) -> None:
    for reason, rollout_ids in dropped.items():
        await db.many(DROP, [{"rollout_id": r, "reason": reason, "step": step} for r in rollout_ids])
    for group in groups:
        await db.many(GROUP_JOIN, [{"first": group[0], "rollout_id": r} for r in group])
