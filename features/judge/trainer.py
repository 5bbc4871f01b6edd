"""Plugs the judge in: an LLM scores calls (`trainer.credit: judge`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...core.prices import require_litellm
from ...trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin
from .config import JudgeConfig, judges_calls

log = logging.getLogger(__name__)


class JudgePlugin(TrainerPlugin):
    """Has the calls scored whose credit is a judge's."""

    def check(self, run: Run) -> None:
        if judges_calls(self.config.trainer):
            require_litellm("judge.calls")

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        from .step_judge import StepJudge

        if not judges_calls(core.config.trainer):
            yield TrainerHooks()
            return
        log.info("judge.calls: %s reads rollouts", core.config.section(JudgeConfig).calls.model)
        yield TrainerHooks(judge=StepJudge(core.config, core.store).missing)


plugin = JudgePlugin
