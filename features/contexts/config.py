"""The section `contexts`: how training treats rejected attempts and summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...core.config.section import FeatureSection
from ...core.records import ModelCall


class ContextsConfig(FeatureSection):
    name = "contexts"
    moved = {"trainer.rejected": "contexts.rejected", "trainer.summaries": "contexts.summaries"}
    names_of_call_fields = ("contexts", "rejected")

    rejected: Literal["leave_out", "negative", "as_others"] = "leave_out"
    summaries: Literal["train", "leave_out"] = "train"

    @classmethod
    def call_fields(cls, calls: Sequence[ModelCall]) -> Sequence[Mapping[str, Any]]:
        """Return each call's edges (none if they cannot be determined), and whether the call was rejected."""
        from .graph import graph_of  # here, since every command reads the configuration

        if (graph := graph_of(calls)) is None:
            return [{"contexts": [], "rejected": False}] * len(calls)
        rejected = graph.rejected()
        return [
            {
                "contexts": [{"edge": edge.kind, "call_id": calls[edge.place].call_id} for edge in one.edges],
                "rejected": place in rejected,
            }
            for place, one in enumerate(graph.calls)
        ]
