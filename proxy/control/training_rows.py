"""Shows the training rows of a group as the prefix tree that a step computes, in runs of tokens. Pure.

A row is the prompt of its last call and that call's answer; the answers of its calls lie in it. Every prefix that rows
share is computed once (trainer/rows/prefix_tree.py). Rows of different adapters share nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..store.reports.credit import CallTokens, TokenIds

# More is not looked at: a tree of so much is no picture any more.
MOST_ROWS, MOST_TOKENS = 512, 2**22
KINDS = ("context", "answer", "left_out")


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A training row. `answers`: its calls, each with the first token of its answer and the one after the last.

    `left_out`: the same of calls whose answers are not trained on.
    """

    rollout_id: str
    row: int
    adapter: str
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


@dataclass(slots=True)
class Forest:
    """The rows of a group that fit into a picture. `left_out` counts the others."""

    rows: list[TrainedRow]
    left_out: int = 0
    tokens: int = 0

    def add(self, rows: Iterable[TrainedRow]) -> None:
        for row in rows:
            if len(self.rows) == MOST_ROWS or self.tokens + len(row.token_ids) > MOST_TOKENS:
                self.left_out += 1
                continue
            self.rows.append(row)
            self.tokens += len(row.token_ids)


def rows_of(rollout_id: str, calls: Sequence[CallTokens], adapter_of: Callable[[str | None], str]) -> list[TrainedRow]:
    """Return the training rows of a rollout from its calls, in order."""
    by_row: dict[int, list[CallTokens]] = {}
    for call in calls:
        if call.row is not None:
            by_row.setdefault(call.row, []).append(call)
    rows = [
        TrainedRow(
            rollout_id,
            row,
            adapter_of(own[-1].agent),
            own[-1].token_ids,
            [(call.call_id, call.answer, len(call.token_ids)) for call in own],
        )
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


def prefix_runs(rows: Sequence[TrainedRow]) -> list[dict[str, Any]]:
    """Return the runs of the rows' prefix tree, in preorder.

    A run is as many tokens as the same rows pass through: it ends where they part, or where one of them ends.
    """
    ordered = sorted(rows, key=lambda row: (row.adapter, _sortable(row.token_ids)))
    shared = [0, *(_shared(a, b) for a, b in pairwise(ordered))]
    runs: list[dict[str, Any]] = []
    waiting: list[tuple[int | None, int, tuple[int, int]]] = [
        (None, 0, part) for part in reversed(_parted(shared, 0, len(ordered), 0))
    ]
    while waiting:
        parent, depth, (low, high) = waiting.pop()
        end = min([len(ordered[low].token_ids), *shared[low + 1 : high]])
        runs.append(_run(ordered[low:high], parent, depth, end))
        index = len(runs) - 1
        ended = next((i for i in range(low, high) if len(ordered[i].token_ids) > end), high)
        waiting += [(index, end, part) for part in reversed(_parted(shared, ended, high, end))]
    return runs


def _shared(a: TrainedRow, b: TrainedRow) -> int:
    """The number of leading tokens that a step computes once for both."""
    length = min(len(a.token_ids), len(b.token_ids)) if a.adapter == b.adapter else 0
    differing = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
    return int(differing[0]) if len(differing) else length


def _parted(shared: Sequence[int], low: int, high: int, depth: int) -> list[tuple[int, int]]:
    """The parts of the rows [low, high), which have `depth` tokens in common, by their next token."""
    starts = [i for i in range(low, high) if i == low or shared[i] <= depth]
    return list(pairwise([*starts, high]))


def _run(rows: Sequence[TrainedRow], parent: int | None, depth: int, end: int) -> dict[str, Any]:
    kinds = np.zeros(end - depth, np.uint8)
    call_ids: list[str] = []
    for _, first, last in (span for row in rows for span in row.left_out):
        kinds[max(0, first - depth) : max(0, last - depth)] = KINDS.index("left_out")
    for row in rows:
        for call_id, first, last in row.answers:
            if first < end and last > depth:
                kinds[max(0, first - depth) : last - depth] = KINDS.index("answer")
                call_ids.append(call_id)
    cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    parts = [(KINDS[kinds[start]], stop - start) for start, stop in pairwise(cuts) if start < stop]
    return {
        "parent": parent,
        "depth": depth,
        "tokens": end - depth,
        "trained": sum(tokens for kind, tokens in parts if kind == "answer"),
        "parts": parts,
        "rows": [[row.rollout_id, row.row] for row in rows],
        "call_ids": call_ids,
    }
