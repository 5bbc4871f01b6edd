"""What a list says of each rollout: its first request and last answer, whose it is, which model, how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...json_text import dumps
from ..database import Database

LARGE = 100_000  # characters; larger requests and answers are not read
# Mean latency of the first calls: a rollout may have thousands.
SUMMARIES = """
SELECT rollouts.rollout_id, began.model, ended.status AS last_call,
       (SELECT name FROM keys WHERE keys.key_id = rollouts.key_id) AS key_name,
       CASE WHEN LENGTH(began.request) <= :large THEN began.request END AS request,
       CASE WHEN LENGTH(ended.response) <= :large THEN ended.response END AS response,
       (SELECT AVG(latency_ms) FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.seq < 32) AS latency_ms
FROM rollouts
LEFT JOIN calls AS began ON began.rollout_id = rollouts.rollout_id AND began.seq = 0
LEFT JOIN calls AS ended ON ended.rollout_id = rollouts.rollout_id
     AND ended.seq = (SELECT MAX(seq) FROM calls WHERE calls.rollout_id = rollouts.rollout_id)
WHERE rollouts.rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids))
"""


class Summary(NamedTuple):
    """`request` and `response`: JSON as it is stored, if it is not large."""

    model: str | None
    key_name: str | None
    request: str | None
    response: str | None
    latency_ms: float | None
    last_call: str | None = None


class Summaries:
    """Reads summaries of the rollouts of a page."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def of(self, rollout_ids: Sequence[str]) -> dict[str, Summary]:
        """Return the summaries of rollouts by their ids."""
        rows = await self._db.all(SUMMARIES, {"rollout_ids": dumps([*rollout_ids]), "large": LARGE})
        return {row["rollout_id"]: Summary(*(row[name] for name in Summary._fields)) for row in rows}
