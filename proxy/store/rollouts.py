"""The rollouts: opened by a request or by their first call, listed, ended, deleted."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import Conflict, NotFound
from ..json_text import dumps, loads
from ..types import Rollout, RolloutName, RolloutStatus
from .conversations import forget_conversations
from .database import Database
from .rows import read

# Runs with the start of every call. The first one opens the rollout; later ones fill in what was not named so far.
ROLLOUT_SEEN = """
INSERT INTO rollouts (rollout_id, task_id, agent, mode, policy_version, created_at)
VALUES (:rollout_id, :task_id, :agent, :mode, :pin, :at)
ON CONFLICT (rollout_id) DO UPDATE SET
    task_id = COALESCE(rollouts.task_id, excluded.task_id),
    agent = COALESCE(rollouts.agent, excluded.agent),
    mode = CASE WHEN excluded.mode = 'eval' THEN 'eval' ELSE rollouts.mode END,
    policy_version = COALESCE(rollouts.policy_version, excluded.policy_version)
"""
ROLLOUT_OPEN = """
INSERT INTO rollouts (rollout_id, task_id, mode, policy_version, metadata, created_at)
VALUES (:rollout_id, :task_id, :mode, :policy_version, :metadata, :at)
"""
ROLLOUT_MODEL = "INSERT INTO rollout_models (rollout_id, model) VALUES (:rollout_id, :model)"
ROLLOUT_KEY = "INSERT INTO rollout_keys (key_hash, rollout_id, key_id) VALUES (:key_hash, :rollout_id, :key_id)"
ROLLOUT = "SELECT * FROM rollouts WHERE rollout_id = :rollout_id"
ROLLOUTS_PAGE = """
SELECT rollouts.* FROM rollouts
WHERE rollouts.n < :cursor {filters}
ORDER BY rollouts.n DESC LIMIT :limit
"""
ROLLOUTS_PAGE_OF_AGENT = """
SELECT rollouts.* FROM rollout_agents CROSS JOIN rollouts ON rollouts.n = rollout_agents.n
WHERE rollout_agents.agent = :agent AND rollout_agents.n < :cursor {filters}
ORDER BY rollout_agents.n DESC LIMIT :limit
"""
ROLLOUT_FILTERS = {
    "status": "AND status = :status",
    "task_id": "AND task_id = :task_id",
    "mode": "AND mode = :mode",
    "agent": "",  # ROLLOUTS_PAGE_OF_AGENT
}
ROLLOUT_END = """
UPDATE rollouts SET status = :status, reason = :reason, ended_at = :at
WHERE rollout_id = :rollout_id AND status = 'running'
"""
ROLLOUT_DELETE = """
DELETE FROM rollouts WHERE rollout_id = :rollout_id AND status <> 'running'
   AND NOT EXISTS (SELECT 1 FROM steps WHERE steps.step = rollouts.step AND steps.status = 'claimed')
"""
ROLLOUT_COUNTS = "SELECT mode, status, rollouts FROM rollout_counts"


class Rollouts:
    """The tables of rollouts, their keys and the models chosen for them."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def open(
        self,
        names: Sequence[tuple[RolloutName, str]],
        metadata: dict[str, Any],
        key_id: str | None = None,
        *,
        policy_version: int | None = None,
        model: str | None = None,
    ) -> None:
        """Open rollouts, each with the hash of its own key.

        `key_id`: the stored key that asked for them. `policy_version`, `model`: what answers the alias in them, if not
        the live version.
        """
        same = {"metadata": dumps(metadata), "policy_version": policy_version, "model": model, "at": time.time()}
        opened = [same | {"rollout_id": n.rollout_id, "task_id": n.task_id, "mode": n.mode} for n, _ in names]
        chosen = [(ROLLOUT_MODEL, opened)] if model is not None else []
        named = [{"rollout_id": n.rollout_id, "key_hash": key_hash, "key_id": key_id} for n, key_hash in names]
        await self._db.commit([(ROLLOUT_OPEN, opened), *chosen, (ROLLOUT_KEY, named)])

    async def get(self, rollout_id: str) -> Rollout:
        """Return the rollout with this id; raise NotFound if there is none."""
        row = await self._db.one(ROLLOUT, {"rollout_id": rollout_id})
        if row is None:
            raise NotFound(f"no rollout {rollout_id!r}", param="rollout_id")
        return read_rollout(row)

    def model_of(self, rollout_id: str) -> str | None:
        """Return the model that answers the alias in this rollout, if it was opened for one. Reads at once."""
        statement = "SELECT model FROM rollout_models WHERE rollout_id = :rollout_id"
        row = self._db.one_now(statement, {"rollout_id": rollout_id})
        return None if row is None else row["model"]

    async def of_key(self, key_hash: str) -> tuple[str, str | None] | None:
        """Return the rollout that a key names, and the id of the stored key (if any) that asked for it."""
        statement = "SELECT rollout_id, key_id FROM rollout_keys WHERE key_hash = :key_hash"
        row = await self._db.one(statement, {"key_hash": key_hash})
        return None if row is None else (row["rollout_id"], row["key_id"])

    async def page(
        self, filters: dict[str, str], limit: int, cursor: int | None = None
    ) -> tuple[list[Rollout], int | None]:
        """Return a page, newest first, and the next page's cursor (None after the last). Filters: ROLLOUT_FILTERS."""
        page_of = ROLLOUTS_PAGE_OF_AGENT if "agent" in filters else ROLLOUTS_PAGE
        statement = page_of.format(filters=" ".join(ROLLOUT_FILTERS[name] for name in filters))
        rows = await self._db.all(statement, {**filters, "cursor": cursor or 2**62, "limit": limit + 1})
        page = rows[:limit]
        return [read_rollout(row) for row in page], page[-1]["n"] if len(rows) > limit else None

    async def counts(self) -> dict[tuple[str, str], int]:
        """Count rollouts by (mode, status)."""
        return {(r["mode"], r["status"]): r["rollouts"] for r in await self._db.all(ROLLOUT_COUNTS)}

    async def end(self, rollout_id: str, status: RolloutStatus, reason: str | None) -> Rollout:
        """End a rollout. Ending it again with the same status changes nothing; with another one it is a Conflict."""
        row = {"rollout_id": rollout_id, "status": status, "reason": reason, "at": time.time()}
        await self._db.commit([(ROLLOUT_END, [row])])
        rollout = await self.get(rollout_id)
        if rollout.status != status:
            raise Conflict(f"rollout {rollout_id!r} has already ended as {rollout.status}", param="status")
        return rollout

    async def delete(self, rollout_id: str) -> None:
        """Delete a rollout and all that was recorded of it; Conflict while it runs or is trained on.

        Its pages are overwritten and the log is cut off. SQLite may leave remains at the unused end of other pages.
        """
        rollout = await self.get(rollout_id)
        if rollout.status == "running":
            raise Conflict(f"rollout {rollout_id!r} is running: end it first", param="status")
        await self._db.commit([(ROLLOUT_DELETE, [{"rollout_id": rollout_id}])])
        with suppress(NotFound):
            await self.get(rollout_id)
            raise Conflict(f"rollout {rollout_id!r} is being trained on: try again after the step", param="status")
        await forget_conversations(self._db, rollout_id)
        await self._db.empty_log()


def read_rollout(row: sqlite3.Row) -> Rollout:
    return read(Rollout, row, metadata=loads(row["metadata"]))
