"""Plugs in what becomes of rejected attempts and of summaries (`contexts.rejected`, `contexts.summaries`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ...trainer.plugins import TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.report.metric_schema import group
from .config import ContextsConfig


class SiftPlugin(TrainerPlugin):
    """Leaves calls out of RL, or pushes them down, for what became of their answers."""

    metrics = group(
        "samples",
        ("calls_rejected", "count", "calls whose answer was not used, and another attempt's was (`contexts.rejected`)"),
        ("calls_summaries", "count", "calls whose answer replaced history in a later prompt (`contexts.summaries`)"),
    )
    counts = tuple(metrics)

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        from .sift import sifted

        yield TrainerHooks(sift=partial(sifted, core.config.trainer.section(ContextsConfig)))


plugin = SiftPlugin
