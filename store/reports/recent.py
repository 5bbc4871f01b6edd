"""The newest rollouts and calls as lists, tasks and `status` show them."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ...core.json_text import dumps
from ...core.records import Mode
from ..database import Database, Row, Sql
from ..rollouts import ROLLOUT_FILTERS

NEWEST_ROLLOUTS = 20_000  # rollouts that are looked at
TASK_SUMS = """
SELECT task_id, COUNT(*) AS rollouts, MIN(n) AS oldest, MIN(reward) AS low, MAX(reward) AS high FROM (
    SELECT n, task_id, reward FROM rollouts WHERE TRUE {filters} ORDER BY n DESC LIMIT :limit
) AS recent GROUP BY task_id ORDER BY MAX(n) DESC
"""
TASK_ROLLOUTS = """
SELECT rollout_id, task_id, mode, policy_version, reward, COALESCE(ended_at, created_at) AS at FROM rollouts
WHERE task_id IN (SELECT CAST(value AS TEXT) FROM json_each(:task_ids)) AND n >= :oldest
    AND (:mode IS NULL OR mode = :mode) AND (:key_id IS NULL OR key_id = :key_id)
ORDER BY n DESC
"""

LARGE_TEXT = 100_000  # characters; larger requests and answers are not read
TEXTS_AT_ONCE = 20  # rollouts whose texts one statement reads
WORDS_KEPT = 5_000  # rollouts whose words are remembered

_FIRST_AND_LAST_CALL = """
FROM rollouts
LEFT JOIN calls AS began ON began.rollout_id = rollouts.rollout_id AND began.seq = 0
LEFT JOIN calls AS ended ON ended.rollout_id = rollouts.rollout_id
     AND ended.seq = (SELECT MAX(seq) FROM calls WHERE calls.rollout_id = rollouts.rollout_id)
WHERE rollouts.rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids))
"""
# Mean latency of the first calls: a rollout may have thousands.
SUMMARIES = f"""
SELECT rollouts.rollout_id, began.model, began.call_id AS first_id, ended.call_id AS last_id, ended.status AS last_call,
       (SELECT name FROM keys WHERE keys.key_id = rollouts.key_id) AS key_name,
       (SELECT AVG(latency_ms) FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND calls.seq < 32) AS latency_ms
{_FIRST_AND_LAST_CALL}
"""
TEXTS = f"""
SELECT rollouts.rollout_id,
       CASE WHEN LENGTH(began.request) <= :large THEN began.request END AS request,
       CASE WHEN LENGTH(ended.response) <= :large THEN ended.response END AS response
{_FIRST_AND_LAST_CALL}
"""

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


class TaskSum(NamedTuple):
    """A task's share of the newest rollouts. `oldest`: its first one; `low`, `high`: of their rewards.

    `task_id` is None for all rollouts without a task.
    """

    task_id: str | None
    rollouts: int
    oldest: int
    low: float | None
    high: float | None


class TaskRollout(NamedTuple):
    """A rollout as its task shows it. `at`: when it ended, or began if it has not ended (Unix time)."""

    rollout_id: str
    task_id: str
    mode: str
    policy_version: int | None
    reward: float | None
    at: float


class Tasks:
    """Reads rollouts by their tasks."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def sums(self, filters: dict[str, Any]) -> list[TaskSum]:
        """Return the tasks of the newest `NEWEST_ROLLOUTS` rollouts, in the order of their newest ones.

        Filters: mode, task_id, key_id.
        """
        statement = TASK_SUMS.format(filters=" ".join(ROLLOUT_FILTERS[name] for name in filters))
        rows = await self._db.all(statement, {**filters, "limit": NEWEST_ROLLOUTS})
        return await asyncio.to_thread(lambda: [TaskSum(*row) for row in rows])

    async def rollouts(self, tasks: Sequence[TaskSum], mode: Mode | None, key_id: str | None) -> list[TaskRollout]:
        """Return the rollouts of some tasks, newest first, back to the first that any of them counts."""
        oldest = min((task.oldest for task in tasks), default=0)
        task_ids = dumps([task.task_id for task in tasks])
        params: dict[str, object] = {"task_ids": task_ids, "oldest": oldest, "mode": mode, "key_id": key_id}
        rows = await self._db.all(TASK_ROLLOUTS, params)
        return await asyncio.to_thread(lambda: [TaskRollout(*row) for row in rows])


class Words(NamedTuple):
    """The first words of a rollout's question and answer."""

    question: str | None
    answer: str | None


WordsIn = Callable[[str | None, str | None], Words]


class Summary(NamedTuple):
    """What a list says of a rollout. `last_call`: the status of its last call."""

    words: Words
    model: str | None
    key_name: str | None
    latency_ms: float | None
    last_call: str | None


class Summaries:
    """Reads summaries of the rollouts of a page.

    A page asks again whenever something happens, so words are remembered until a further call begins or ends.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._words: OrderedDict[tuple[str, ...], Words] = OrderedDict()

    async def of(self, rollout_ids: Sequence[str], words_in: WordsIn) -> dict[str, Summary]:
        """Return the summaries of rollouts by their ids. `words_in`: finds the words in a stored request and answer."""
        found = await self._db.all(SUMMARIES, {"rollout_ids": dumps([*rollout_ids])})
        rows = {row["rollout_id"]: row for row in found}
        words = {name: known for name, row in rows.items() if (known := self._words.get(_state(row)))}
        missing = [name for name in rows if name not in words]
        for i in range(0, len(missing), TEXTS_AT_ONCE):
            texts = await self._db.all(
                TEXTS, {"rollout_ids": dumps(missing[i : i + TEXTS_AT_ONCE]), "large": LARGE_TEXT}
            )
            words |= await asyncio.to_thread(_words_of, texts, words_in)
        self._words |= {_state(rows[name]): known for name, known in words.items()}
        while len(self._words) > WORDS_KEPT:
            self._words.popitem(last=False)
        return {name: _summary(rows[name], known) for name, known in words.items()}


def _words_of(texts: Sequence[Row], words_in: WordsIn) -> dict[str, Words]:
    return {row["rollout_id"]: words_in(row["request"], row["response"]) for row in texts}


def _state(row: Row) -> tuple[str, ...]:
    """What the words depend on."""
    return tuple(str(row[name]) for name in ("rollout_id", "first_id", "last_id", "last_call"))


def _summary(row: Row, words: Words) -> Summary:
    return Summary(words, row["model"], row["key_name"], row["latency_ms"], row["last_call"])


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
