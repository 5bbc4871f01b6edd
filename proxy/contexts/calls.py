"""Shows with each call of a rollout where its context comes from, and whether its answer was rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..types import ModelCall
from .graph import Graph

NAMES = ("contexts", "rejected")


def graph_of(calls: Sequence[ModelCall]) -> Graph:
    """Return the graph of a rollout's calls, which are in order."""
    graph = Graph()
    for call in calls:
        graph.add(call)
    return graph


def fields(calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
    """Return `contexts` and `rejected` of each call of a rollout."""
    graph = graph_of(calls)
    rejected = graph.rejected()
    return [
        {
            "contexts": [{"edge": edge.kind, "call_id": calls[edge.place].call_id} for edge in one.edges],
            "rejected": place in rejected,
        }
        for place, one in enumerate(graph.calls)
    ]
