"""The store as the proxy sees it: rollouts, calls, tool calls and rewards. The trainer's side is `ledger.py`."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any

import orjson

from ..errors import Conflict, NotFound
from ..json_text import dumps, loads_or_none
from ..types import CallStatus, ModelCall, Reward, Rollout, RolloutName, RolloutStatus
from . import calls as rows
from . import sql
from .database import Database, Runs


class Store:
    """Reads and writes of rollouts, calls and rewards. Every method that writes is one transaction."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # Calls: the recorder hands over whole batches ------------------------------------------------------------------

    async def write(self, runs: Runs, size: int = 0) -> None:
        """Run statements of `sql.py`, each with all of its rows, in one transaction; about `size` bytes in all."""
        await self._db.commit(runs, size)

    async def calls(self, rollout_id: str) -> list[ModelCall]:
        """The rollout's calls in order, with tool results and rewards; NotFound if there is no such rollout."""
        await self.rollout(rollout_id)
        params: dict[str, object] = {"rollout_id": rollout_id}
        return rows.read_calls(
            await self._db.all(sql.CALLS, params),
            await self._db.all(sql.TOOL_CALLS, params),
            rows.call_rewards(await self.rewards(rollout_id)),
            await self._db.all(sql.POLICY_LOG_DURING, params),
        )

    async def superseded(
        self, rollout_id: str, request: dict[str, Any], running: Container[str] = ()
    ) -> ModelCall | None:
        """The call of the rollout that this request sends again: the newest like it that did not end well.

        Rather one that failed than one that was not ended: another process may be answering that. Else the rollout's
        newest call, if it is like it: its answer did not reach the client. Never one of `running`.
        """
        try:
            calls = await self.calls(rollout_id)
        except NotFound:
            return None
        alike = [c for c in calls if c.superseded_by is None and c.call_id not in running and c.request == request]
        failed = [c for c in alike if c.status in ("error", "cancelled")]
        failed = failed or [c for c in alike if c.status == "incomplete"]
        return failed[-1] if failed else next((c for c in alike if c is calls[-1]), None)

    async def call_status(self, rollout_id: str, call_id: str) -> CallStatus | None:
        """None: there is no such call. One of another rollout counts as ok."""
        row = await self._db.one(sql.CALL_STATUS, {"rollout_id": rollout_id, "call_id": call_id})
        return None if row is None else row["status"]

    async def is_recorded(self, rollout_id: str, response_id: str) -> bool:
        """Whether an answer of this `id` is recorded in the rollout."""
        row: dict[str, object] = {"rollout_id": rollout_id, "pattern": f"%{response_id}%"}
        found = [loads_or_none(row["response"]) for row in await self._db.all(sql.RESPONSES_WITH, row)]
        return any(isinstance(answer, dict) and answer.get("id") == response_id for answer in found)

    # Rollouts ------------------------------------------------------------------------------------------------------

    async def open_rollouts(
        self,
        names: Sequence[tuple[RolloutName, str]],
        metadata: dict[str, Any],
        key_id: str | None = None,
        *,
        policy_version: int | None = None,
        model: str | None = None,
    ) -> None:
        """Open rollouts, each with the hash of the key that names it; `key_id`: the stored key that asked for them.

        `policy_version`, `model`: what answers the alias in them, if not the live version.
        """
        same = {"metadata": dumps(metadata), "policy_version": policy_version, "model": model, "at": time.time()}
        opened = [same | {"rollout_id": n.rollout_id, "task_id": n.task_id, "mode": n.mode} for n, _ in names]
        chosen = [(sql.ROLLOUT_CHOOSES, opened)] if model is not None else []
        named = [{"rollout_id": n.rollout_id, "key_hash": key_hash, "key_id": key_id} for n, key_hash in names]
        await self.write([(sql.ROLLOUT_OPEN, opened), *chosen, (sql.ROLLOUT_KEY, named)])

    async def rollout(self, rollout_id: str) -> Rollout:
        row = await self._db.one(sql.ROLLOUT, {"rollout_id": rollout_id})
        if row is None:
            raise NotFound(f"no rollout {rollout_id!r}", param="rollout_id")
        return rows.read_rollout(row)

    def model_of(self, rollout_id: str) -> str | None:
        """The model that answers the alias in this rollout, where it was opened for one; at once, for every call."""
        row = self._db.one_now(sql.ROLLOUT_CHOSE, {"rollout_id": rollout_id})
        return None if row is None else row["model"]

    async def rollout_of_key(self, key_hash: str) -> tuple[str, str | None] | None:
        """The rollout that a key was given out for, and the stored key (if one) that it was asked for with."""
        row = await self._db.one(sql.ROLLOUT_OF_KEY, {"key_hash": key_hash})
        return None if row is None else (row["rollout_id"], row["key_id"])

    async def rollouts(
        self, filters: dict[str, str], limit: int, cursor: int | None = None
    ) -> tuple[list[Rollout], int | None]:
        """A page, newest first, and the cursor of the next page (None: this is the last). Filters: ROLLOUT_FILTERS."""
        page_of = sql.ROLLOUTS_PAGE_OF_AGENT if "agent" in filters else sql.ROLLOUTS_PAGE
        statement = page_of.format(filters=" ".join(sql.ROLLOUT_FILTERS[name] for name in filters))
        found = await self._db.all(statement, {**filters, "cursor": cursor or 2**62, "limit": limit + 1})
        page = found[:limit]
        return [rows.read_rollout(row) for row in page], page[-1]["n"] if len(found) > limit else None

    async def rollout_counts(self) -> dict[tuple[str, str], int]:
        """How many rollouts there are by (mode, status)."""
        return {(r["mode"], r["status"]): r["rollouts"] for r in await self._db.all(sql.ROLLOUT_COUNTS)}

    async def totals(self) -> dict[str, Any]:
        """How many calls and rewards there are, counted one by one, and when the oldest rollout was opened."""
        row = await self._db.one(sql.STORE_TOTALS)
        assert row is not None
        return dict(row)

    async def end_rollout(self, rollout_id: str, status: RolloutStatus, reason: str | None) -> Rollout:
        """End a rollout; ending it again in the same way changes nothing, in another way is a Conflict."""
        row = {"rollout_id": rollout_id, "status": status, "reason": reason, "at": time.time()}
        async with self._db.transaction() as db:
            await db.execute(sql.ROLLOUT_END, row)
        rollout = await self.rollout(rollout_id)
        if rollout.status != status:
            raise Conflict(f"rollout {rollout_id!r} has already ended as {rollout.status}", param="status")
        return rollout

    async def delete_rollout(self, rollout_id: str) -> None:
        """Forget a rollout and all that was recorded of it; Conflict while it runs or is trained on.

        Its pages are overwritten and the log is cut off; SQLite may leave bits at the unused end of pages of others.
        """
        rollout = await self.rollout(rollout_id)
        if rollout.status == "running":
            raise Conflict(f"rollout {rollout_id!r} is running: end it first", param="status")
        await self.write([(sql.ROLLOUT_DELETE, [{"rollout_id": rollout_id}])])
        with suppress(NotFound):
            await self.rollout(rollout_id)
            raise Conflict(f"rollout {rollout_id!r} is being trained on: try again after the step", param="status")
        await self._forget_conversations(rollout_id)
        await self._db.empty_log()

    async def _forget_conversations(self, rollout_id: str) -> None:
        """Looked for among all, without an index: it would have to be kept up at every call."""
        for of_it, delete in ((sql.TIPS_OF, sql.TIP_DELETE), (sql.POINTS_OF, sql.POINT_DELETE)):
            if found := await self._db.all(of_it, {"rollout_id": rollout_id}):
                await self.write([(delete, [dict(row) for row in found])])

    # Rewards -------------------------------------------------------------------------------------------------------

    async def rewards(self, rollout_id: str) -> list[Reward]:
        """All rewards ever posted for a rollout, oldest first."""
        return [rows.read_reward(row) for row in await self._db.all(sql.REWARDS, {"rollout_id": rollout_id})]

    async def post_rewards(self, rewards: Sequence[Reward], key: str | None, body: bytes) -> list[dict[str, Any]]:
        """Record all of `rewards` or none, and answer one object each.

        `key` (the Idempotency-Key) with the same body gives the first answer again; with another body a Conflict.
        """
        body_hash = hashlib.sha256(body).hexdigest()

        def work(db: sqlite3.Connection) -> list[dict[str, Any]]:
            if key is not None and (answer := earlier_answer(db, key, body_hash)) is not None:
                return answer
            answer = [_post_reward(db, reward) for reward in rewards]
            if key is not None:
                remember_answer(db, key, body_hash, answer)
            return answer

        return await self._db.run(work)


def _post_reward(db: sqlite3.Connection, reward: Reward) -> dict[str, Any]:
    at = time.time()
    row = {"rollout_id": reward.rollout_id, "call_id": reward.call_id, "at": at, "value": reward.value}
    rollout = db.execute(sql.ROLLOUT, row).fetchone()
    if rollout is None:
        raise NotFound(f"no rollout {reward.rollout_id!r}", param="rollout_id")
    if reward.call_id is not None and db.execute(sql.CALL_EXISTS, row).fetchone() is None:
        raise NotFound(f"rollout {reward.rollout_id!r} has no call {reward.call_id!r}", param="call_id")
    details = {"name": reward.name, "source": reward.source, "comment": reward.comment, "final": reward.final}
    (inserted,) = db.execute(sql.REWARD, row | details).fetchall()
    if reward.name == "reward":
        db.execute(sql.ROLLOUT_REWARDED, row)
        if reward.call_id is None:
            db.execute(sql.ROLLOUT_REWARD, row)
    if reward.final:
        db.execute(sql.ROLLOUT_COMPLETE, row)
    if reward.retrain:
        before = {name: rollout[name] for name in ("task_id", "step", "dropped")}
        db.execute(sql.ROLLOUT_OFFER_AGAIN, row | before)
    return {"reward_id": inserted["reward_id"], "rollout_id": reward.rollout_id, "status": "recorded"}


def earlier_answer(db: sqlite3.Connection, key: str, body_hash: str) -> list[dict[str, Any]] | None:
    found = db.execute(sql.IDEMPOTENT_ANSWER, {"key": key}).fetchone()
    if found is None:
        return None
    if found["body_hash"] != body_hash:
        raise Conflict("this Idempotency-Key was used for another body; use a new key", param="Idempotency-Key")
    answer: list[dict[str, Any]] = orjson.loads(found["answer"])
    return answer


def remember_answer(db: sqlite3.Connection, key: str, body_hash: str, answer: list[dict[str, Any]]) -> None:
    row = {"key": key, "body_hash": body_hash, "answer": orjson.dumps(answer).decode(), "at": time.time()}
    db.execute(sql.IDEMPOTENT_SAVE, row)
