"""Shows with each call of a rollout where its context comes from, and whether its answer was rejected."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...core.records import ModelCall
from .graph import Graph

log = logging.getLogger(__name__)

NAMES = ("contexts", "rejected")


def graph_of(calls: Sequence[ModelCall]) -> Graph | None:
    """Return the graph of a rollout's calls, which are in order; None if they cannot be read."""
    graph = Graph()
    try:
        for call in calls:
            graph.add(call)
    except Exception:  # the rollout is shown and trained on whatever its requests look like
        log.exception("rollout %s: its contexts are not known", calls[0].rollout_id)
        return None
    return graph


def fields(calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
    """Return `contexts` and `rejected` of each call of a rollout."""
    if (graph := graph_of(calls)) is None:
        return [{"contexts": [], "rejected": False} for _ in calls]
    rejected = graph.rejected()
    return [
        {
            "contexts": [{"edge": edge.kind, "call_id": calls[edge.place].call_id} for edge in one.edges],
            "rejected": place in rejected,
        }
        for place, one in enumerate(graph.calls)
    ]
