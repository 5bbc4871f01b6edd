"""Plugs the judge in: an LLM scores calls (`trainer.credit: judge`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...core.prices import require_litellm
from ...trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin
from .config import JudgeKeys

log = logging.getLogger(__name__)


class JudgePlugin(TrainerPlugin):
    """Has the calls scored whose credit is a judge's."""

    def check(self, run: Run) -> None:
        if JudgeKeys.of(self.config.trainer).judged:
            require_litellm("trainer.judge")

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        from .step_judge import StepJudge

        config = JudgeKeys.of(core.config.trainer)
        if not config.judged:
            yield TrainerHooks()
            return
        log.info("trainer.judge: %s reads rollouts", config.judge.model)
        yield TrainerHooks(judge=StepJudge(core.config, core.store).missing)


plugin = JudgePlugin
