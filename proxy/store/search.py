"""Finds rollouts by what no index knows: rewards, times, texts. A search looks at a bounded number and can go on."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from ..json_text import dumps
from ..types import Rollout
from .database import Database
from .rollouts import ROLLOUT_FILTERS, ROLLOUTS_PAGE, ROLLOUTS_PAGE_OF_AGENT, read_rollout

# Newest first of those whose ids begin alike, by the index on ids.
ROLLOUTS_PAGE_OF_PREFIX = """
SELECT rollouts.* FROM rollouts INDEXED BY sqlite_autoindex_rollouts_1
WHERE rollout_id >= :prefix AND rollout_id < :prefix_end AND +rollouts.n < :cursor {filters}
ORDER BY +rollouts.n DESC LIMIT :limit
"""
_LOOKED_AT = "SELECT n, {fits} AS fits FROM ({page}) AS found ORDER BY n DESC"
_OF_NUMBERS = "SELECT * FROM rollouts WHERE n IN (SELECT value FROM json_each(:numbers)) ORDER BY n DESC"
_FITS = {
    "min_reward": "reward >= :min_reward",
    "max_reward": "reward <= :max_reward",
    "since": "created_at >= :since",
    "text": """EXISTS (
        SELECT 1 FROM calls WHERE calls.rollout_id = found.rollout_id
        AND (request LIKE :text ESCAPE '!' OR response LIKE :text ESCAPE '!' OR request LIKE :escaped ESCAPE '!')
        UNION ALL
        SELECT 1 FROM calls JOIN large_requests USING (call_id) WHERE calls.rollout_id = found.rollout_id
        AND (large_requests.request LIKE :text ESCAPE '!' OR large_requests.request LIKE :escaped ESCAPE '!')
    )""",
}
AFTER_ALL_IDS = "\x7f"  # after every character of an id
ALL = 2**62
# How many rollouts a search looks at: in one statement, and until it answers with what it has found so far.
CHUNK, MOST = 5_000, 100_000
TEXT_CHUNK, MOST_TEXTS = 50, 1_000
MOST_S = 2.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked for. `since`: Unix time. `text`: anywhere in requests and answers, whatever the case of ASCII."""

    min_reward: float | None = None
    max_reward: float | None = None
    since: float | None = None
    text: str | None = None
    prefix: str | None = None


async def search(
    database: Database, filters: dict[str, Any], wanted: Wanted, limit: int, cursor: int | None = None
) -> tuple[list[Rollout], int | None]:
    """Return what fits, newest first, and where to go on. The page may be short, or empty, and not be the last."""
    chunk, most = (TEXT_CHUNK, MOST_TEXTS) if wanted.text is not None else (CHUNK, MOST)
    statement, values = _statement(filters, wanted)
    numbers: list[int] = []
    looked, until, position = 0, time.monotonic() + MOST_S, cursor or ALL
    while True:
        rows = await database.all(statement, {**values, "cursor": position, "limit": chunk})
        fitting = [row["n"] for row in rows if row["fits"]][: limit - len(numbers)]
        numbers += fitting
        looked += len(rows)
        if len(numbers) == limit and (fitting[-1] != rows[-1]["n"] or len(rows) == chunk):
            return await _read(database, numbers), fitting[-1]
        if len(rows) < chunk:
            return await _read(database, numbers), None
        position = rows[-1]["n"]
        if looked >= most or time.monotonic() > until:
            return await _read(database, numbers), position


async def _read(database: Database, numbers: list[int]) -> list[Rollout]:
    return [read_rollout(row) for row in await database.all(_OF_NUMBERS, {"numbers": dumps(numbers)})]


def _statement(filters: dict[str, Any], wanted: Wanted) -> tuple[str, dict[str, Any]]:
    page, values = ROLLOUTS_PAGE, dict(filters)
    if wanted.prefix is not None:
        page = ROLLOUTS_PAGE_OF_PREFIX
        values |= {"prefix": wanted.prefix, "prefix_end": wanted.prefix + AFTER_ALL_IDS}
    elif "agent" in filters:
        page = ROLLOUTS_PAGE_OF_AGENT
    given = {name: value for name in _FITS if (value := getattr(wanted, name)) is not None}
    if wanted.text is not None:
        given["text"] = _pattern(dumps(wanted.text))
        # A first request is kept in the agent's own writing; None compares with nothing, at once.
        given["escaped"] = None if wanted.text.isascii() else _pattern(json.dumps(wanted.text))
    own = " ".join(ROLLOUT_FILTERS[name] for name in filters)
    if wanted.prefix is not None and "agent" in filters:
        own += " AND EXISTS (SELECT 1 FROM rollout_agents AS a WHERE a.agent = :agent AND a.n = rollouts.n)"
    fits = " AND ".join(text for name, text in _FITS.items() if name in given) or "1"
    return _LOOKED_AT.format(fits=fits, page=page.format(filters=own)), values | given


def _pattern(string: str) -> str:
    """For LIKE: what stands in this JSON string, anywhere."""
    return f"%{string[1:-1].replace('!', '!!').replace('%', '!%').replace('_', '!_')}%"
