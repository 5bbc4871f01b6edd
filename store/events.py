"""The events that an agent reports between its calls: states, actions that no model chose, notes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..core.json_text import dumps_or_none, loads_or_none
from ..core.records import Event, RolloutName
from .database import Database, Row, Transaction, read
from .rewards import Answer, answer_once
from .rollouts import ROLLOUT_SEEN

JSON = ("value", "arguments", "result")

EVENT = """
INSERT INTO events (rollout_id, seq, kind, agent, name, value, arguments, result, is_error, created_at)
VALUES (
    :rollout_id, (SELECT COALESCE(MAX(seq) + 1, 0) FROM calls
                  WHERE rollout_id = :rollout_id AND (:comes_last OR started_at <= :at)),
    :kind, :agent, :name, :value, :arguments, :result, :is_error, :at
)
RETURNING event_id
"""


class Events:
    """The table of events. Events are context and are never trained on."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def post(
        self,
        rollout: RolloutName,
        events: Sequence[Event],
        key: str | None = None,
        body: bytes = b"",
        at: float | None = None,
    ) -> Answer:
        """Record all of `events` or none, after all calls that have begun: by the time `at`, or else by now.

        Opens a rollout that is unknown so far. `key` as in `Rewards.post`.
        """
        row: dict[str, Any] = {"rollout_id": rollout.rollout_id, "task_id": rollout.task_id, "agent": rollout.agent}
        row |= {"mode": rollout.mode, "pin": None, "key_id": rollout.key_id, "at": time.time() if at is None else at}
        row |= {"evidence": rollout.evidence, "comes_last": at is None}

        async def work(db: Transaction) -> Answer:
            await db.run(ROLLOUT_SEEN, row)
            recorded = await db.many(EVENT, [row | _row(event, rollout.agent) for event in events])
            answer = {"rollout_id": rollout.rollout_id, "status": "recorded"}
            return [{"event_id": one["event_id"]} | answer for one in recorded]

        request = rollout.rollout_id.encode() + b"\n" + body
        return await self._db.write(lambda db: answer_once(db, key, request, lambda: work(db)))

    async def of(self, rollout_id: str) -> list[Event]:
        """Return the rollout's events in order."""
        statement = "SELECT * FROM events WHERE rollout_id = :rollout_id ORDER BY seq, created_at, event_id"
        return [_event(row) for row in await self._db.all(statement, {"rollout_id": rollout_id})]


def _row(event: Event, agent: str | None) -> dict[str, Any]:
    texts = {name: dumps_or_none(getattr(event, name)) for name in JSON}
    return {"kind": event.kind, "name": event.name, "is_error": event.is_error, "agent": event.agent or agent} | texts


def _event(row: Row) -> Event:
    return read(Event, row, is_error=bool(row["is_error"]), **{name: loads_or_none(row[name]) for name in JSON})
