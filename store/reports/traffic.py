"""The newest calls in a few numbers: how they ended, how long they took, what was sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ..database import Database, Sql

# By order of insertion, as in `calls.UNTRAINABLE`. Of an answer's tokens only the length is read.
# A usage of other types counts 0.
RECENT_CALLS = Sql(
    """
SELECT status, started_at, latency_ms, ttft_ms,
       CAST(COALESCE(usage ->> '$.completion_tokens', usage ->> '$.output_tokens', LENGTH(token_ids) / 4, 0) AS INTEGER)
           AS tokens
FROM calls ORDER BY rowid DESC LIMIT :newest
""",
    postgres=r"""
SELECT status, started_at, latency_ms, ttft_ms,
       CASE WHEN used ~ '^[0-9]{1,15}$' THEN used::BIGINT WHEN used IS NOT NULL THEN 0
            ELSE COALESCE(LENGTH(token_ids) / 4, 0) END AS tokens
FROM (
    SELECT *, CASE WHEN strpos(usage, '\u') = 0
        THEN COALESCE(usage::json ->> 'completion_tokens', usage::json ->> 'output_tokens') END AS used
    FROM calls ORDER BY rowid DESC LIMIT :newest
) AS recent
""",
)


@dataclass(frozen=True, slots=True)
class RecentTraffic:
    """The newest calls. `since`: when the oldest of them began (Unix time).

    `latency_ms` and `ttft_ms` are medians; `response_tokens` is what was sampled in all of them.
    """

    calls: int
    since: float | None
    by_status: dict[str, int]
    latency_ms: float | None
    ttft_ms: float | None
    response_tokens: int


class Traffic:
    """Reads the newest calls."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def recent(self, newest: int) -> RecentTraffic:
        """Sum up the newest calls, at most so many."""
        rows = await self._db.all(RECENT_CALLS, {"newest": newest})
        return RecentTraffic(
            calls=len(rows),
            since=min((row["started_at"] for row in rows), default=None),
            by_status=dict(Counter(row["status"] for row in rows).most_common()),
            latency_ms=_median(row["latency_ms"] for row in rows),
            ttft_ms=_median(row["ttft_ms"] for row in rows),
            response_tokens=sum(row["tokens"] for row in rows),
        )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
