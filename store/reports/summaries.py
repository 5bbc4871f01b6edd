"""What a list says of each rollout: its first request and last answer, whose it is, which model, how long it took."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...core.json_text import dumps
from ..database import Database, Row

LARGE = 100_000  # characters; larger requests and answers are not read
AT_ONCE = 20  # rollouts whose texts one statement reads
KEPT = 5_000  # rollouts whose words are remembered

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
        for i in range(0, len(missing), AT_ONCE):
            texts = await self._db.all(TEXTS, {"rollout_ids": dumps(missing[i : i + AT_ONCE]), "large": LARGE})
            words |= await asyncio.to_thread(_words_of, texts, words_in)
        self._words |= {_state(rows[name]): known for name, known in words.items()}
        while len(self._words) > KEPT:
            self._words.popitem(last=False)
        return {name: _summary(rows[name], known) for name, known in words.items()}


def _words_of(texts: Sequence[Row], words_in: WordsIn) -> dict[str, Words]:
    return {row["rollout_id"]: words_in(row["request"], row["response"]) for row in texts}


def _state(row: Row) -> tuple[str, ...]:
    """What the words depend on."""
    return tuple(str(row[name]) for name in ("rollout_id", "first_id", "last_id", "last_call"))


def _summary(row: Row, words: Words) -> Summary:
    return Summary(words, row["model"], row["key_name"], row["latency_ms"], row["last_call"])
