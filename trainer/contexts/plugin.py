"""Plugs in what becomes of rejected attempts and of summaries (`trainer.rejected`, `trainer.summaries`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ...proxy.contexts.config import ContextKeys
from ..plugins.hooks import TrainerCore, TrainerHooks, TrainerPlugin


class SiftPlugin(TrainerPlugin):
    """Leaves calls out of RL, or pushes them down, for what became of their answers."""

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        from .sift import sifted

        yield TrainerHooks(sift=partial(sifted, ContextKeys.of(core.config.trainer)))


plugin = SiftPlugin
