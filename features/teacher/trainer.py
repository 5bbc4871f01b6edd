"""Adds the teacher (`teacher`) to training steps."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...serving.vllm import VllmServer, operator_session
from ...trainer.plugins import TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.report.metric_schema import group
from ...trainer.waiting import GuideError
from .config import TeacherConfig

log = logging.getLogger(__name__)
ROW_S = 120.0  # that the teacher may take for one row; then the step waits and asks again

METRICS = group(
    "guides",
    ("guided_share", "share", "trained tokens that a guide scored"),
    ("guide_advantage", "1", "absolute value of what guides add to a token's advantage; mean over guided tokens"),
    ("guide_kl", "nats", "KL divergence of the policy from its guides, over the same tokens (estimator k1)"),
    ("calls_taught", "count", "calls that the teacher scored"),
    ("teacher_tokens", "count", "tokens that the teacher read and sampled"),
    ("calls_not_plain", "count", "calls that the teacher cannot score: not sampled at plain temperature 1"),
    ("calls_beyond_teacher", "count", "calls that begin beyond the teacher's context length"),
    ("guide_s", "s", "time that the guide takes, before `step_s`"),
)


class GuidesPlugin(TrainerPlugin):
    """Adds the teacher's scores to RL; fine-tuning methods do not use it."""

    metrics = METRICS

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
            server = VllmServer(session, config.base_url, config.credentials, timeout_s=ROW_S)
            teacher = Teacher(config, server, engine.tokenizer)
            try:
                await teacher.check()
            except GuideError as error:
                log.warning("training steps will wait: %s", error)
            yield TrainerHooks(guide=teacher.guided)


plugin = GuidesPlugin
