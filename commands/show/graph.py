"""Draws a rollout's contexts in a terminal: a column for each, a line for each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ..formats import plain

SAME = ("continues", "edits", "retries")  # edges that stay in a column
COLUMNS = 12  # at most; contexts beyond are drawn in the last one


def graph_lines(calls: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line for each call of a rollout: its context's column, its number, agent and edges."""
    seqs = {call["call_id"]: call["seq"] for call in calls}
    columns: dict[str, int] = {}
    last: dict[int, str] = {}  # the newest call of each column
    ends = _ends(calls)
    for place, call in enumerate(calls):
        edges = call.get("contexts", [])
        same = [one["call_id"] for one in edges if one["edge"] in SAME]
        column = next((columns[one] for one in same if last.get(columns[one]) == one), None)
        if column is None:
            free = (i for i in range(COLUMNS - 1) if i not in last or ends[last[i]] < place)
            column = next(free, COLUMNS - 1)
        is_open = [i in last and ends[last[i]] >= place for i in range(column)]
        columns[call["call_id"]], last[column] = column, call["call_id"]
        names = [f"{one['edge']} {seqs.get(one['call_id'], '?')}" for one in edges] or ["new"]
        line = Text("".join("│ " if there else "  " for there in is_open), "dim").append("● ", "bold")
        line.append_text(plain(f"{call['seq']:<4} {call['agent'] or ''}".rstrip() + "  "))
        line.append(", ".join(names), "cyan")
        yield line.append("  rejected", "red") if call.get("rejected") else line


def _ends(calls: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The place of the last call that stays in the column of each call."""
    ends = {call["call_id"]: place for place, call in enumerate(calls)}
    for place, call in reversed([*enumerate(calls)]):
        for one in call.get("contexts", []):
            if one["edge"] != "compacts" and one["call_id"] in ends:
                ends[one["call_id"]] = max(ends[one["call_id"]], place)
    return ends
