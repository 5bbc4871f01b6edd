"""Decides which calls of a rollout are trained on, by how their answers were used (`contexts`).

Example, a rollout with return 1 and advantage 0.5: a first answer that was rejected, the answer to the same request
that was used instead, and a summary that replaces the history in a later prompt.

    call                   rejected, summary    returned, advantage
    0 rejected             leave_out            none: it is left out
                           negative             1.0, -0.5
                           as_others            1.0, +0.5
    1 used instead of 0                         1.0, +0.5
    2 summary              train                1.0, +0.5
                           leave_out            none: it is left out
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from ...core.records import ModelCall
from ...trainer.plugins import TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.report.metric_schema import group
from ...trainer.types import Sifted
from .config import ContextsConfig
from .graph import graph_of


def sifted(config: ContextsConfig, calls: Sequence[ModelCall]) -> Sifted:
    """Return the calls, and which are left out or negative. Rejected calls that are left out count as superseded."""
    if (graph := graph_of(calls)) is None:
        return Sifted(calls)
    rejected, summaries = graph.rejected(), graph.summaries()
    dropped = rejected if config.rejected == "leave_out" else {}
    return Sifted(
        [
            replace(call, superseded_by=calls[dropped[i]].call_id) if i in dropped else call
            for i, call in enumerate(calls)
        ],
        left_out={*dropped, *(summaries if config.summaries == "leave_out" else ())},
        negative={*(rejected if config.rejected == "negative" else ())},
        counts={"calls_rejected": len(rejected), "calls_summaries": len(summaries)},
    )


class SiftPlugin(TrainerPlugin):
    metrics = group(
        "samples",
        ("calls_rejected", "count", "calls with an answer that was not used (`contexts.rejected`)"),
        (
            "calls_summaries",
            "count",
            "calls with an answer that replaced history in a later prompt (`contexts.summaries`)",
        ),
    )

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        yield TrainerHooks(sift=partial(sifted, core.config.trainer.section(ContextsConfig)))


plugin = SiftPlugin
