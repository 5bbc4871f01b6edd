"""Plugs the judge in: an LLM scores calls (`trainer.credit: judge`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...proxy.providers import require_litellm
from ...proxy.rewarders.config import JudgeKeys
from ..plugins.hooks import Run, TrainerCore, TrainerHooks, TrainerPlugin


class JudgePlugin(TrainerPlugin):
    """Has the calls scored whose credit is a judge's."""

    def check(self, run: Run) -> None:
        if JudgeKeys.of(self.config.trainer).judged:
            require_litellm("trainer.judge")

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        from .judge import StepJudge

        config = JudgeKeys.of(core.config.trainer)
        yield TrainerHooks(judge=StepJudge(config, core.store).missing if config.judged else None)


plugin = JudgePlugin
