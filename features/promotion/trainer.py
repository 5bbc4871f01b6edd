"""Publishes new weights as candidates (`promotion.mode: gated`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...trainer.plugins import TrainerCore, TrainerHooks, TrainerPlugin
from .config import PromotionConfig
from .promotions import NOT_GATED, Promotions, candidates_server


class GatedPublishingPlugin(TrainerPlugin):
    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        config, store, swap = core.config, core.store, core.swap
        tests = Promotions(store.database)
        if swap is None:
            yield TrainerHooks()
        elif not config.section(PromotionConfig).is_gated:
            await tests.end(NOT_GATED)
            yield TrainerHooks()
        else:
            from .gated import CandidateSwap, GatedPublisher

            placed = candidates_server(config, tests)
            own = CandidateSwap(store, swap.vllm, swap.mode, config.policy.directory, placed)
            yield TrainerHooks(publisher=GatedPublisher(config, store, own, core.engine))


plugin = GatedPublishingPlugin
