"""`rollouts show --graph`: a column for each open context, a line for each call."""

from __future__ import annotations

from typing import Any

from lightning_proxy.commands.show.graph import COLUMNS, graph_lines


def call(place: int, *edges: tuple[str, int], agent: str | None = None, rejected: bool = False) -> dict[str, Any]:
    contexts = [{"edge": edge, "call_id": f"c{there}"} for edge, there in edges]
    return {"call_id": f"c{place}", "seq": place, "agent": agent, "contexts": contexts, "rejected": rejected}


def test_contexts_are_columns_and_their_edges_are_named() -> None:
    calls = [
        call(0, agent="lead"),
        call(1, ("delegates", 0), agent="helper"),
        call(2, ("continues", 1), agent="helper"),
        call(3, ("continues", 0), ("returns", 2), agent="lead"),
        call(4, ("continues", 3), rejected=True),
        call(5, ("continues", 3)),
        call(6, ("compacts", 5)),
    ]
    assert [line.plain for line in graph_lines(calls)] == [
        "● 0    lead  new",
        "│ ● 1    helper  delegates 0",
        "│ ● 2    helper  continues 1",
        "● 3    lead  continues 0, returns 2",
        "● 4  continues 3  rejected",
        "● 5  continues 3",
        "● 6  compacts 5",
    ]


def test_more_contexts_than_columns_share_the_last_one() -> None:
    calls = [call(0), *(call(i, ("delegates", 0)) for i in range(1, 30)), call(30, ("continues", 0))]
    lines = [line.plain for line in graph_lines(calls)]
    assert len(lines) == 31 and max(line.index("●") for line in lines) <= 2 * COLUMNS


def test_a_rollout_of_a_proxy_without_contexts_is_drawn_too() -> None:
    assert [line.plain for line in graph_lines([{"call_id": "c", "seq": 0, "agent": None}])] == ["● 0  new"]
