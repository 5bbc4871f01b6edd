"""How a rollout was trained: the credit of its calls, the siblings it was compared with, and the tokens of its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.json_text import dumps
from ..database import Database, Row, read

TokenIds = NDArray[np.int32]

SIBLINGS = 256  # at most, the rollout itself among them
CREDIT_OF = """
SELECT calls.call_id, calls.seq, calls.agent, call_credit.step, call_credit."return" AS returned,
       call_credit.advantage, call_credit."row", call_credit.placed
FROM rollouts CROSS JOIN calls ON calls.rollout_id = rollouts.rollout_id
     LEFT JOIN call_credit ON call_credit.n = rollouts.n AND call_credit.seq = calls.seq
WHERE rollouts.rollout_id = :rollout_id ORDER BY calls.seq
"""
CREDIT_OF_SEVERAL = """
SELECT rollout_id, seq, call_credit.step, "return" AS returned, advantage
FROM rollouts CROSS JOIN call_credit ON call_credit.n = rollouts.n
WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids))
"""
# Itself first. Those that a step compared with it, or that were opened with it, or, one by one, of its task since its
# last step. `:key_id`: only those that were opened with this key.
COMPARED_WITH = """
WITH wanted AS (SELECT n, group_id, opened_with, task_id, mode, step FROM rollouts WHERE rollout_id = :rollout_id)
SELECT rollout_id, n, reward, step, dropped,
       (SELECT advantage FROM call_credit WHERE call_credit.n = rollouts.n ORDER BY seq LIMIT 1) AS advantage
FROM rollouts
WHERE n IN (
    SELECT n FROM wanted
    UNION SELECT one.n FROM wanted CROSS JOIN rollouts AS one ON one.group_id = wanted.group_id WHERE :siblings
    UNION SELECT one.n FROM wanted CROSS JOIN rollouts AS one ON one.opened_with = wanted.opened_with
          WHERE :siblings AND wanted.group_id IS NULL
    UNION SELECT n FROM (
        SELECT one.n FROM wanted CROSS JOIN rollouts AS one ON one.task_id = wanted.task_id
        WHERE :siblings AND wanted.group_id IS NULL AND wanted.opened_with IS NULL
              AND wanted.mode = 'train' AND wanted.step IS NULL AND one.group_id IS NULL AND one.opened_with IS NULL
              AND one.mode || '' = 'train' AND one.step IS NULL AND one.dropped IS NULL
        ORDER BY one.n DESC LIMIT :limit
    ) AS recent
) AND (rollout_id = :rollout_id OR :key_id IS NULL OR key_id = :key_id)
ORDER BY rollout_id <> :rollout_id, n LIMIT :limit
"""
TOKENS_OF = """
SELECT calls.call_id, calls.agent, call_credit."row", calls.parent_id, calls.prompt_shared, calls.prompt_ids,
       calls.token_ids
FROM rollouts CROSS JOIN calls ON calls.rollout_id = rollouts.rollout_id
     LEFT JOIN call_credit ON call_credit.n = rollouts.n AND call_credit.seq = calls.seq
WHERE rollouts.rollout_id = :rollout_id ORDER BY calls.seq
"""


@dataclass(frozen=True, slots=True)
class CallWithCredit:
    """A call, and how it was trained (`CallCredit`). Without credit these fields are None: nothing was trained on."""

    call_id: str
    seq: int
    agent: str | None
    step: int | None
    returned: float | None
    advantage: float | None
    row: int | None
    placed: str | None


class CreditOfCall(NamedTuple):
    """The newest step that trained a call, the return and the advantage that it had there."""

    step: int
    returned: float
    advantage: float


CreditBySeq = Mapping[int, CreditOfCall]


@dataclass(frozen=True, slots=True)
class ComparedRollout:
    """A rollout of a group. `advantage`: of its first call that has credit."""

    rollout_id: str
    reward: float | None
    advantage: float | None
    step: int | None
    dropped: str | None


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of a call, prompt and answer; the answer begins at `answer`. `row`: the training row it is in."""

    call_id: str
    agent: str | None
    row: int | None
    token_ids: TokenIds
    answer: int


class Credit:
    """Reads how calls were trained. `TrainingSteps.claim` writes it."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def of(self, rollout_id: str) -> list[CallWithCredit]:
        """Return the rollout's calls, in order."""
        return [read(CallWithCredit, row) for row in await self._db.all(CREDIT_OF, {"rollout_id": rollout_id})]

    async def of_several(self, rollout_ids: Sequence[str]) -> dict[str, dict[int, CreditOfCall]]:
        """Return the credit of the calls of these rollouts, by rollout and `seq`; none of those without credit."""
        found: dict[str, dict[int, CreditOfCall]] = {}
        for row in await self._db.all(CREDIT_OF_SEVERAL, {"rollout_ids": dumps([*rollout_ids])}):
            rollout_id, seq, *credit = row
            found.setdefault(rollout_id, {})[seq] = CreditOfCall(*credit)
        return found

    async def group_of(
        self, rollout_id: str, key_id: str | None = None, *, siblings: bool = True
    ) -> list[ComparedRollout]:
        """Return a rollout and its siblings, compared or not yet, oldest first; itself alone without `siblings`.

        With `key_id`, only siblings that were opened with this key. At most `SIBLINGS` rollouts.
        """
        values = {"rollout_id": rollout_id, "key_id": key_id, "siblings": siblings, "limit": SIBLINGS}
        rows = await self._db.all(COMPARED_WITH, values)
        return [read(ComparedRollout, row) for row in sorted(rows, key=lambda row: int(row["n"]))]

    async def tokens_of(self, rollout_id: str) -> list[CallTokens]:
        """Return the tokens of the rollout's calls, in order."""
        rows = await self._db.all(TOKENS_OF, {"rollout_id": rollout_id})
        return await asyncio.to_thread(_read_tokens, rows)


def _read_tokens(rows: Iterable[Row]) -> list[CallTokens]:
    """A parent comes before the calls that are stored against it."""
    calls: dict[str, CallTokens] = {}
    for row in rows:
        parent = calls.get(row["parent_id"])
        shared = [] if parent is None else [parent.token_ids[: row["prompt_shared"]]]
        prompt = np.concatenate([*shared, _ids(row["prompt_ids"])])
        tokens = np.concatenate([prompt, _ids(row["token_ids"])])
        calls[row["call_id"]] = CallTokens(row["call_id"], row["agent"], row["row"], tokens, len(prompt))
    return [*calls.values()]


def _ids(packed: bytes | None) -> TokenIds:
    """The token ids that `pack_ids` packed."""
    return np.frombuffer(packed or b"", np.int32)
