"""The store as the trainer sees it: which rollouts each step took, and which policy version is live.

Commit points: `claim` (a step owns its rollouts), `trained` (they are never offered again), `set_live` (alias moves).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..errors import NotFound
from ..json_text import dumps, loads
from ..types import CollapseSign, PolicyVersion, PublishMode, Reward, Rollout
from . import calls as rows
from . import sql
from .database import Database


@dataclass(frozen=True, slots=True)
class Group:
    """The ended, not yet trained rollouts of one task. `completed` of `ended` have a reward.

    `task_id` None: those without a task, which are no siblings; only rewarded ones are counted. Where failed rollouts
    count for something (`trainer.failed_rollouts`), each of them has a reward: `failed` in the methods below.
    """

    task_id: str | None
    completed: int
    ended: int
    oldest: float


@dataclass(frozen=True, slots=True)
class Step:
    """A training step. `base`: the policy version it started from; `version`: the one it was published as."""

    step: int
    status: str
    base: int
    version: int | None
    checkpoint: str | None
    created_at: float
    finished_at: float | None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Collapse:
    """Why publication is stopped since `at` (Unix time), until a version is made live by hand.

    `sign`, `what`: what was seen. `live_at`: since when the version is live that was live then. `go_back_to`: the
    newest version from before that can be served, or else the oldest since. Kept in the metrics of the last step as
    `collapse`.
    """

    sign: CollapseSign
    what: str
    at: float
    live_at: float | None
    go_back_to: int

    @classmethod
    def of(cls, last: Step | None, live: PolicyVersion) -> Collapse | None:
        """None if nothing is stopped, or was, and another version was made live since, or the same once more."""
        stored = last.metrics.get("collapse") if last else None
        return cls(**stored) if stored and stored["live_at"] == live.live_at else None

    @property
    def story(self) -> str:
        """For a person: what was seen, what is so now, what can be done."""
        return (
            f"{self.what}. Agents are served as before; nothing is trained or published until a version is made live "
            f"by hand: `lightning-proxy policy promote {self.go_back_to}` goes back"
        )


class Ledger:
    """Training steps and policy versions. Every method that writes is one transaction."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._live: tuple[int, PolicyVersion] | None = None  # since which row of the log; the version

    # Steps ---------------------------------------------------------------------------------------------------------

    async def groups(self, failed: bool = False) -> list[Group]:
        """Tasks with at least one rollout to train on, the longest waiting first."""
        return [
            Group(r["task_id"], r["completed"], r["ended"], r["oldest"])
            for r in await self._db.all(sql.CLAIMABLE_GROUPS, {"failed": failed})
        ]

    async def group_rollouts(self, task_id: str) -> list[Rollout]:
        """The rollouts of a `Group`, in the order in which they ended."""
        return [rows.read_rollout(r) for r in await self._db.all(sql.CLAIMABLE_OF_TASK, {"task_id": task_id})]

    async def lone(self, failed: bool = False) -> Group | None:
        """The rewarded rollouts without a task, if there are any."""
        row = await self._db.one(sql.CLAIMABLE_LONE, {"failed": failed})
        assert row is not None  # it counts
        return Group(None, row["completed"], row["completed"], row["oldest"]) if row["completed"] else None

    async def waiting(self, *, lone: bool, failed: bool = False) -> int:
        """How many complete rollouts no step has taken yet; those without a task only if `lone`."""
        of_nothing = await self.lone(failed) if lone else None
        return sum(group.completed for group in [*await self.groups(failed), *([of_nothing] if of_nothing else [])])

    async def lone_rollouts(self, limit: int, failed: bool = False) -> list[Rollout]:
        """Those rollouts, in the order in which they ended."""
        return [rows.read_rollout(r) for r in await self._db.all(sql.LONE, {"limit": limit, "failed": failed})]

    async def earlier(self, rollout_id: str, task_id: str | None, limit: int, failed: bool = False) -> list[Rollout]:
        """Rewarded rollouts that were opened before this one, newest first: of a task, or (None) all."""
        statement = sql.EARLIER if task_id is None else sql.EARLIER_OF_TASK
        params = {"rollout_id": rollout_id, "limit": limit, "failed": failed}
        params |= {} if task_id is None else {"task_id": task_id}
        return [rows.read_rollout(r) for r in await self._db.all(statement, params)]

    async def rewarded_as(self, names: Sequence[str]) -> None:
        """Rollouts that wait for a reward have one if any of these names was posted."""
        async with self._db.transaction() as db:
            await db.executemany(sql.ROLLOUTS_REWARDED_AS, [{"name": name} for name in names])

    async def newest_call(self) -> float | None:
        """When the newest call ended, or began if it did not end (Unix time)."""
        row = await self._db.one(sql.CALL_NEWEST)
        return None if row is None else float(row["started_at"] + (row["latency_ms"] or 0.0) / 1000)

    async def calls_under_way(self, since: float) -> int:
        """How many calls that began after `since` were not ended."""
        row = await self._db.one(sql.CALLS_UNDER_WAY, {"since": since})
        return 0 if row is None else int(row["n"])

    async def claim(
        self, rollout_ids: Sequence[str], base: int, dropped: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> int:
        """Give rollouts to a new step and return its number; with `dropped` as `drop` does, but for this step."""
        async with self._db.transaction() as db:
            inserted = list(await db.execute_fetchall(sql.STEP_NEW, {"base": base, "at": time.time()}))
            step = int(inserted[0]["step"])
            await db.executemany(sql.CLAIM, [{"step": step, "rollout_id": r} for r in rollout_ids])
            await db.executemany(sql.DROP, _drops(dropped, step))
        return step

    async def drop(self, dropped: Mapping[str, Sequence[str]]) -> None:
        """Never offer these rollouts again, and say why: ids by reason."""
        async with self._db.transaction() as db:
            await db.executemany(sql.DROP, _drops(dropped, None))

    async def trained(self, step: int, checkpoint: str | None, metrics: dict[str, Any]) -> None:
        """The step is done and its checkpoint is whole: its rollouts are never offered again."""
        row = {"step": step, "checkpoint": checkpoint, "metrics": dumps(metrics), "at": time.time()}
        async with self._db.transaction() as db:
            await db.execute(sql.STEP_TRAINED, row)

    async def release_unfinished(self) -> list[int]:
        """Give back what steps took and dropped that a killed trainer left behind; returns those steps."""
        async with self._db.transaction() as db:
            steps = [int(r["step"]) for r in await db.execute_fetchall(sql.STEPS_CLAIMED)]
            for step in steps:
                await db.execute(sql.RELEASE, {"step": step})
                await db.execute(sql.RELEASE_DROPPED, {"step": step})
                await db.execute(sql.STEP_FORGET, {"step": step})
        return steps

    async def end_epoch(self, step: int, metrics: dict[str, Any], offer: bool) -> None:
        """Say so in the metrics of the last step, and (if `offer`) offer what was trained on again: both or neither."""
        async with self._db.transaction() as db:
            await db.execute(sql.STEP_METRICS, {"step": step, "metrics": dumps(metrics)})
            if offer:
                await db.execute(sql.OFFER_ALL)

    async def forget_training(self) -> None:
        """As if nothing had been trained on and nothing published; the base model is live."""
        async with self._db.transaction() as db:
            for statement in sql.FORGET_TRAINING:
                await db.execute(statement)
        await self.set_live(0)

    async def rollouts_of(self, step: int) -> list[Rollout]:
        """The rollouts that a step took."""
        return [rows.read_rollout(row) for row in await self._db.all(sql.CLAIMED, {"step": step})]

    async def has_trained(self) -> bool:
        """Whether steps took any rollouts since all were offered again (`end_epoch`)."""
        return await self._db.one(sql.ANY_CLAIMED) is not None

    async def rewarded_since(self, version: int, newest: int) -> list[tuple[Rollout, list[Reward]]]:
        """Of the `newest` rollouts those that ended and began with this version or a later one, in order of opening."""
        params: dict[str, object] = {"version": version, "newest": newest}
        rewards = defaultdict[str, list[Reward]](list)
        for row in await self._db.all(sql.REWARDS_SINCE_VERSION, params):
            rewards[row["rollout_id"]].append(rows.read_reward(row))
        found = await self._db.all(sql.ROLLOUTS_SINCE_VERSION, params)
        return [(rows.read_rollout(row), rewards[row["rollout_id"]]) for row in found]

    async def newest_reward(self) -> int | None:
        """A number that grows with every reward."""
        row = await self._db.one(sql.REWARD_NEWEST)
        return None if row is None else row["n"]

    async def last_step(self) -> Step | None:
        row = await self._db.one(sql.STEP_LAST)
        return None if row is None else _read_step(row)

    async def collapse(self) -> Collapse | None:
        """What publication is stopped for."""
        return Collapse.of(await self.last_step(), await self.live())

    async def step_of_version(self, version: int) -> Step | None:
        """The step that a policy version was published from; None for the base model."""
        row = await self._db.one(sql.STEP_OF_VERSION, {"version": version})
        return None if row is None else _read_step(row)

    async def steps(self) -> list[Step]:
        """All finished steps, oldest first."""
        return [_read_step(row) for row in await self._db.all(sql.STEPS)]

    async def first_steps(self, limit: int) -> list[Step]:
        """The first steps of RL that changed the policy, oldest first."""
        return [_read_step(row) for row in await self._db.all(sql.STEPS_FIRST, {"limit": limit})]

    async def newest_steps(self, limit: int) -> list[Step]:
        """The last finished steps, newest first."""
        return [_read_step(row) for row in await self._db.all(sql.STEPS_NEWEST, {"limit": limit})]

    async def update_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        async with self._db.transaction() as db:
            await db.execute(sql.STEP_METRICS, {"step": step, "metrics": dumps(metrics)})

    async def forget_checkpoint(self, step: int) -> None:
        """The checkpoint's directory is gone."""
        async with self._db.transaction() as db:
            await db.execute(sql.STEP_FORGET_CHECKPOINT, {"step": step})

    # Policy versions -----------------------------------------------------------------------------------------------

    async def live(self) -> PolicyVersion:
        row = await self._db.one(sql.LIVE_VERSION)
        assert row is not None  # the first migration inserts version 0
        return rows.read_version(row)

    def live_now(self) -> PolicyVersion:
        """The same at once, for every call that is routed; of the record, what does not change while it is live."""
        since = self._db.one_now(sql.LIVE_SINCE)
        assert since is not None
        if self._live is None or self._live[0] != since["n"]:
            row = self._db.one_now(sql.LIVE_VERSION)
            assert row is not None
            self._live = (since["n"], rows.read_version(row))
        return self._live[1]

    async def versions(self) -> list[PolicyVersion]:
        return [rows.read_version(row) for row in await self._db.all(sql.VERSIONS)]

    async def version(self, version: int) -> PolicyVersion:
        row = await self._db.one(sql.VERSION, {"version": version})
        if row is None:
            raise NotFound(f"no policy version {version}", param="version")
        return rows.read_version(row)

    async def new_version(self, publish: PublishMode, step: int, metrics: dict[str, Any]) -> int:
        """Reserve the next version number, in the state `publishing`."""
        row = {"publish": publish, "step": step, "at": time.time(), "metrics": dumps(metrics)}
        async with self._db.transaction() as db:
            inserted = list(await db.execute_fetchall(sql.VERSION_NEW, row))
        return int(inserted[0]["version"])

    async def versions_of_others(self, versions: Iterable[int]) -> None:
        """Versions that rollouts from elsewhere were sampled by: none of ours gets their numbers."""
        async with self._db.transaction() as db:
            await db.executemany(sql.VERSION_OF_OTHERS, [{"version": v, "at": time.time()} for v in versions])

    async def saved(
        self, version: int, path: str, served_model: str | None, adapters: Mapping[str, str] | None = None
    ) -> None:
        """The version's files are whole; it is served as this, and its further adapters by name."""
        row = {"version": version, "path": path, "served_model": served_model, "adapters": dumps(adapters or {})}
        async with self._db.transaction() as db:
            await db.execute(sql.VERSION_SAVED, row)

    async def set_live(self, version: int, step: int | None = None, *, verified: bool = False) -> None:
        """Move the alias: calls from now on count for this version."""
        row = {"version": version, "at": time.time(), "step": step}
        async with self._db.transaction() as db:
            await db.execute(sql.POLICY_LOG, row)
            await db.execute(sql.VERSION_LIVE, row)
            await db.execute(sql.VERSION_RETIRE, row)
            if verified:
                await db.execute(sql.VERSION_VERIFIED, row)
            if step is not None:
                await db.execute(sql.STEP_PUBLISHED, row)

    async def verified(self, version: int) -> None:
        """vLLM was seen to serve these weights."""
        async with self._db.transaction() as db:
            await db.execute(sql.VERSION_VERIFIED, {"version": version})

    async def failed(self, version: int, error: str) -> None:
        """The version did not go live, and never will."""
        async with self._db.transaction() as db:
            await db.execute(sql.VERSION_FAILED, {"version": version, "error": error})
            await db.execute(sql.STEP_NOT_PUBLISHED, {"version": version})

    async def forget_unfinished(self, version: int) -> None:
        """The version that was being published never was."""
        async with self._db.transaction() as db:
            await db.execute(sql.VERSION_FORGET_UNFINISHED, {"version": version})

    async def forget_files(self, version: int) -> None:
        """The version's files are gone: it cannot be promoted any more."""
        async with self._db.transaction() as db:
            await db.execute(sql.VERSION_FORGET_PATH, {"version": version})

    async def pinned(self, since: float) -> set[int]:
        """Versions that running rollouts opened after `since` (Unix time) began with."""
        return {int(r["policy_version"]) for r in await self._db.all(sql.PINNED_VERSIONS, {"since": since})}


def _drops(dropped: Mapping[str, Sequence[str]], step: int | None) -> list[dict[str, Any]]:
    return [{"rollout_id": r, "reason": reason, "step": step} for reason, ids in dropped.items() for r in ids]


def _read_step(row: Any) -> Step:
    fields = ("step", "status", "base", "version", "checkpoint", "created_at", "finished_at")
    return Step(metrics=loads(row["metrics"]), **{name: row[name] for name in fields})
