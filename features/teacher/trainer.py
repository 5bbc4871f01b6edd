"""Plugs the teacher in (`teacher`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...serving.vllm import VllmServer, operator_session
from ...trainer.plugins import TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.waiting import GuideError
from .config import TeacherConfig

log = logging.getLogger(__name__)


class GuidesPlugin(TrainerPlugin):
    """Teaches RL; methods of fine-tuning do without."""

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        if core.run.method != "rl" or not core.config.trainer.has_guide:
            yield TrainerHooks()
            return
        from ...trainer.step.trainer import LightningTrainer
        from .teacher import Teacher

        config, engine = core.config.section(TeacherConfig), core.engine
        assert config.base_url is not None and isinstance(engine, LightningTrainer)
        async with operator_session() as session:
            server = VllmServer(session, config.base_url, config.credentials, timeout_s=config.timeout_s)
            teacher = Teacher(config, server, engine.processing_class)
            try:
                await teacher.check()
            except GuideError as error:
                log.warning("steps will wait: %s", error)
            yield TrainerHooks(guide=teacher)


plugin = GuidesPlugin
