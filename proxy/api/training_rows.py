"""The training rows of a rollout, by its calls, and as `GET /rollouts/{id}/rows` answers them. Pure.

A row is the prompt of its last call and that call's answer; the answers of its calls lie in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from ...store.reports import CallTokens, ComparedRollout, TokenIds


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A training row. `answers`: its calls, each with the first token of its answer and the one after the last.

    `left_out`: the same of calls whose answers are not trained on.
    """

    row: int
    token_ids: TokenIds
    answers: Sequence[tuple[str, int, int]]
    left_out: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def trained_tokens(self) -> int:
        return sum(end - start for _, start, end in self.answers)

    def view(self) -> dict[str, Any]:
        """Return the row as JSON, without its tokens."""
        return {
            "row": self.row,
            "call_ids": [call_id for call_id, _, _ in self.answers],
            "tokens": len(self.token_ids),
            "trained_tokens": self.trained_tokens,
        }


def rows_of(calls: Sequence[CallTokens]) -> list[TrainedRow]:
    """Return the training rows of a rollout from its calls, in order."""
    by_row: dict[int, list[CallTokens]] = {}
    for call in calls:
        if call.row is not None:
            by_row.setdefault(call.row, []).append(call)
    rows = [
        TrainedRow(row, own[-1].token_ids, [(call.call_id, call.answer, len(call.token_ids)) for call in own])
        for row, own in sorted(by_row.items())
    ]
    ordered = sorted((_sortable(row.token_ids), i) for i, row in enumerate(rows))
    for call in calls:
        begins = _sortable(call.token_ids)
        at = bisect_left(ordered, (begins, 0))
        if call.row is None and at < len(ordered) and ordered[at][0].startswith(begins):
            rows[ordered[at][1]].left_out.append((call.call_id, call.answer, len(call.token_ids)))
    return rows


def _sortable(token_ids: TokenIds) -> bytes:
    """Bytes that sort as the tokens do."""
    return token_ids.astype(">i4").tobytes()


class CreditedCall(BaseModel):
    """How a call was trained, by the newest step that took its rollout: null where it has no credit.

    `row`: the index of the rollout's training row. `placed`: `first` of its rollout; `merged` into a row; `drift`,
    `edited`, `repeated`, `adjoining` or `new`: why it opened a row; otherwise why it is in none.
    """

    call_id: str
    seq: int
    agent: str | None
    step: int | None
    # `return` is a word of Python's own.
    returned: float | None = Field(alias="return")
    advantage: float | None
    row: int | None
    placed: str | None


class TrainingRow(BaseModel):
    row: int
    call_ids: list[str]
    tokens: int
    trained_tokens: int


class TrainingRows(BaseModel):
    """`group`: the rollouts it was or will be compared with, itself among them, at most 256, oldest first."""

    rollout_id: str
    task_id: str | None
    step: int | None
    dropped: str | None
    group: list[ComparedRollout]
    calls: list[CreditedCall]
    rows: list[TrainingRow]
