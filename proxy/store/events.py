"""What an agent says of itself between its calls: the state it is in, actions that no model chose, notes."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..json_text import dumps_or_none, loads_or_none
from ..recording.redact import Redactor
from ..types import Event, RolloutName
from . import sql
from .database import Database
from .rollouts import earlier_answer, remember_answer


def redacted(event: Event, redactor: Redactor) -> Event:
    """The event without what may not be stored."""
    said = {name: getattr(event, name) for name in ("name", "value", "arguments", "result")}
    return replace(event, **{name: redactor.value(value, "event") for name, value in said.items()})


class Events:
    """Reads and writes of events. They are context: no token of theirs is ever trained on."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def post(
        self, rollout: RolloutName, events: Sequence[Event], key: str | None = None, body: bytes = b""
    ) -> list[dict[str, Any]]:
        """Record all of `events` or none, after all calls that have begun; a rollout unknown so far is opened.

        `key` (the Idempotency-Key) with the same body gives the first answer again; with another body a Conflict.
        """
        row: dict[str, Any] = {"rollout_id": rollout.rollout_id, "task_id": rollout.task_id, "agent": rollout.agent}
        row |= {"mode": rollout.mode, "pin": None, "at": time.time()}
        body_hash = hashlib.sha256(rollout.rollout_id.encode() + b"\n" + body).hexdigest()

        def work(db: sqlite3.Connection) -> list[dict[str, Any]]:
            if key is not None and (answer := earlier_answer(db, key, body_hash)) is not None:
                return answer
            db.execute(sql.ROLLOUT_SEEN, row)
            answer = []
            for event in events:
                (inserted,) = db.execute(sql.EVENT, row | _row(event, rollout.agent)).fetchall()
                answer.append(
                    {"event_id": inserted["event_id"], "rollout_id": rollout.rollout_id, "status": "recorded"}
                )
            if key is not None:
                remember_answer(db, key, body_hash, answer)
            return answer

        return await self._db.run(work)

    async def of(self, rollout_id: str) -> list[Event]:
        """The rollout's, in order."""
        return [_event(row) for row in await self._db.all(sql.EVENTS, {"rollout_id": rollout_id})]


def _row(event: Event, agent: str | None) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "agent": event.agent or agent,
        "name": event.name,
        "value": dumps_or_none(event.value),
        "arguments": dumps_or_none(event.arguments),
        "result": dumps_or_none(event.result),
        "is_error": event.is_error,
    }


def _event(row: sqlite3.Row) -> Event:
    texts = {name: loads_or_none(row[name]) for name in ("value", "arguments", "result")}
    fields = {name: row[name] for name in ("kind", "agent", "name", "event_id", "seq", "created_at")}
    return Event(is_error=bool(row["is_error"]), **texts, **fields)
