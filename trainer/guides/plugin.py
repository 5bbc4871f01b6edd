"""Plugs the guides in: a teacher, and the policy itself after hints (`trainer.teacher`, `trainer.hints`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...proxy.guides.config import GuideKeys
from ...proxy.policy.vllm import VllmServer, operator_session
from ..plugins.hooks import TrainerCore, TrainerHooks, TrainerPlugin
from ..types import Guide
from ..waiting import GuideError

log = logging.getLogger(__name__)


class GuidesPlugin(TrainerPlugin):
    """Guides RL; methods of fine-tuning do without."""

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        if core.run.method != "rl" or not core.config.trainer.guides:
            yield TrainerHooks()
            return
        from ..step.trainer import LightningTrainer
        from .guides import Guides
        from .hints import Hints
        from .teacher import Teacher

        config, engine, guides = GuideKeys.of(core.config.trainer), core.engine, list[Guide]()
        assert isinstance(engine, LightningTrainer)
        tokenizer = engine.processing_class
        async with operator_session() as session:
            if config.teacher.base_url is not None:
                url, headers, timeout_s = config.teacher.base_url, config.teacher.credentials, config.teacher.timeout_s
                teacher = Teacher(config.teacher, VllmServer(session, url, headers, timeout_s=timeout_s), tokenizer)
                try:
                    await teacher.check()
                except GuideError as error:
                    log.warning("steps will wait: %s", error)
                guides.append(teacher)
            if config.hints != "off":
                guides.append(Hints(config, core.store, tokenizer, engine.max_tokens, engine.scores_of))
            yield TrainerHooks(guide=Guides(guides))


plugin = GuidesPlugin
