"""Reads what only people look at: the newest rollouts and calls, and how a rollout was trained on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..core.json_text import dumps
from ..core.records import CallStatus
from .database import Records, Row, read
from .rollouts import ROLLOUT_FILTERS

NEWEST_ROLLOUTS = 20_000  # rollouts that are looked at
NEWEST = """
SELECT rollout_id, task_id, mode, policy_version, reward, COALESCE(ended_at, created_at) AS at FROM rollouts
WHERE TRUE {filters} ORDER BY n DESC LIMIT :limit
"""
LARGE_TEXT = 100_000  # characters; larger requests and answers are not read
TEXTS_AT_ONCE = 20  # rollouts per statement that reads texts
# Mean latency of the first calls: a rollout may have thousands.
SUMMARIES = """
SELECT rollouts.rollout_id, began.model, ended.status AS last_call,
       (SELECT name FROM keys WHERE keys.key_id = rollouts.key_id) AS key,
       (SELECT AVG(latency_ms) FROM calls AS one WHERE one.rollout_id = rollouts.rollout_id AND seq < 32) AS latency_ms,
       CASE WHEN LENGTH(began.request) <= :large THEN began.request END AS request,
       CASE WHEN LENGTH(ended.response) <= :large THEN ended.response END AS response
FROM rollouts
LEFT JOIN calls AS began ON began.rollout_id = rollouts.rollout_id AND began.seq = 0
LEFT JOIN calls AS ended ON ended.rollout_id = rollouts.rollout_id
     AND ended.seq = (SELECT MAX(seq) FROM calls WHERE calls.rollout_id = rollouts.rollout_id)
WHERE rollouts.rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids))
"""

# By order of insertion, as in `calls.UNTRAINABLE`.
RECENT_CALLS = """
SELECT status, started_at, latency_ms, ttft_ms, output_tokens FROM calls ORDER BY rowid DESC LIMIT :newest
"""
SIBLINGS = 256  # at most, the rollout itself among them
CREDIT_OF = """
SELECT calls.call_id, calls.seq, calls.agent, call_credit.step, call_credit."return" AS "return",
       call_credit.advantage, call_credit."row", call_credit.placed,
       prompt_shared + COALESCE(LENGTH(prompt_ids), 0) / 4 AS prompt, COALESCE(LENGTH(token_ids), 0) / 4 AS answer
FROM rollouts CROSS JOIN calls ON calls.rollout_id = rollouts.rollout_id
     LEFT JOIN call_credit ON call_credit.n = rollouts.n AND call_credit.seq = calls.seq
WHERE rollouts.rollout_id = :rollout_id ORDER BY calls.seq
"""
# Of too many siblings, itself is one. Those that a step compared with it, or that were opened with it, or, one by one,
# of its task since its last step. `:key_id`: only those that were opened with this key.
COMPARED_WITH = """
WITH wanted AS (SELECT n, group_id, task_id, mode, step FROM rollouts WHERE rollout_id = :rollout_id)
SELECT * FROM (SELECT rollout_id, n, reward, step, dropped,
       (SELECT advantage FROM call_credit WHERE call_credit.n = rollouts.n ORDER BY seq LIMIT 1) AS advantage
FROM rollouts
WHERE n IN (
    SELECT n FROM wanted
    UNION SELECT one.n FROM wanted CROSS JOIN rollouts AS one ON one.group_id = wanted.group_id WHERE :siblings
    UNION SELECT n FROM (
        SELECT one.n FROM wanted CROSS JOIN rollouts AS one ON one.task_id = wanted.task_id
        WHERE :siblings AND wanted.group_id IS NULL
              AND wanted.mode = 'train' AND wanted.step IS NULL AND one.group_id IS NULL
              AND one.mode || '' = 'train' AND one.step IS NULL AND one.dropped IS NULL
        ORDER BY one.n DESC LIMIT :limit
    ) AS recent
) AND (rollout_id = :rollout_id OR :key_id IS NULL OR key_id = :key_id)
ORDER BY rollout_id <> :rollout_id, n
LIMIT :limit) AS compared ORDER BY n
"""
Words = tuple[str | None, str | None]  # the first ones of a rollout's question, and of its answer
WordsIn = Callable[[str | None, str | None], Words]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A rollout in a list. `key`: the name of its key; `last_call`: the status of its last call."""

    question: str | None = None
    answer: str | None = None
    model: str | None = None
    key: str | None = None
    latency_ms: float | None = None
    last_call: CallStatus | None = None


@dataclass(frozen=True, slots=True)
class RecentTraffic:
    """The newest calls. `since`: when the oldest of them began (Unix time).

    `latency_ms` and `ttft_ms` are medians; `response_tokens` is the total of sampled tokens.
    """

    calls: int
    since: float | None
    by_status: dict[str, int]
    latency_ms: float | None
    ttft_ms: float | None
    response_tokens: int


class Reports(Records):
    """Reads the newest rollouts and calls, for lists and the status."""

    async def newest_rollouts(self, filters: dict[str, Any]) -> Sequence[Row]:
        """Return the newest `NEWEST_ROLLOUTS` rollouts. `at`: when a rollout ended, or began if it has not ended.

        `filters` may have mode, task_id and key_id.
        """
        statement = NEWEST.format(filters=" ".join(ROLLOUT_FILTERS[name] for name in filters))
        return await self._db.all(statement, {**filters, "limit": NEWEST_ROLLOUTS})

    async def summaries(self, rollout_ids: Sequence[str], words_in: WordsIn) -> dict[str, Summary]:
        """Return summaries by rollout id. `words_in` finds the first words of a stored request and answer."""
        found: dict[str, Summary] = {}

        def read_some(rows: Sequence[Row]) -> None:
            for row in rows:
                question, answer = words_in(row["request"], row["response"])
                found[row["rollout_id"]] = read(Summary, row, question=question, answer=answer)

        for i in range(0, len(rollout_ids), TEXTS_AT_ONCE):
            some = {"rollout_ids": dumps([*rollout_ids[i : i + TEXTS_AT_ONCE]]), "large": LARGE_TEXT}
            await asyncio.to_thread(read_some, await self._db.all(SUMMARIES, some))
        return found

    async def traffic(self, newest: int) -> RecentTraffic:
        rows = await self._db.all(RECENT_CALLS, {"newest": newest})

        def middle(name: str) -> float | None:
            known = [row[name] for row in rows if row[name] is not None]
            return median(known) if known else None

        return RecentTraffic(
            calls=len(rows),
            since=min((row["started_at"] for row in rows), default=None),
            by_status=dict(Counter(row["status"] for row in rows).most_common()),
            latency_ms=middle("latency_ms"),
            ttft_ms=middle("ttft_ms"),
            response_tokens=sum(row["output_tokens"] or 0 for row in rows),
        )


@dataclass(frozen=True, slots=True)
class ComparedRollout:
    """A rollout in a group. `advantage`: that of its first call with credit."""

    rollout_id: str
    reward: float | None
    advantage: float | None
    step: int | None
    dropped: str | None


class Credit(Records):
    """Reads the credit of calls, which `TrainingSteps.claim` writes."""

    async def of(self, rollout_id: str) -> Sequence[Row]:
        """Return the rollout's calls in order, with credit as in `CallCredit`; None where no step assigned any.

        `prompt`, `answer`: token counts.
        """
        return await self._db.all(CREDIT_OF, {"rollout_id": rollout_id})

    async def group_of(
        self, rollout_id: str, key_id: str | None = None, *, siblings: bool = True
    ) -> list[ComparedRollout]:
        """Return a rollout and its siblings, at most `SIBLINGS` rollouts in total, oldest first.

        With `key_id`, only siblings that were opened with this key are returned; without `siblings`, none are.
        """
        values = {"rollout_id": rollout_id, "key_id": key_id, "siblings": siblings, "limit": SIBLINGS}
        return await self._db.records(ComparedRollout, COMPARED_WITH, **values)
