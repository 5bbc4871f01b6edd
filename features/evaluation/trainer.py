"""Evaluates new versions (`evaluation`), and keeps the files of the best version."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...core.config.rollouts import require_program
from ...core.errors import ConfigError
from ...trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.report.metric_schema import group
from .config import EvaluationConfig

log = logging.getLogger(__name__)


class EvaluatingPlugin(TrainerPlugin):
    metrics = group(
        "eval",
        ("eval_reward", "reward", "mean reward of held-out tasks"),
        ("eval_low", "reward", "lower end of the mean reward's 95 % interval"),
        ("eval_high", "reward", "upper end of the mean reward's 95 % interval"),
        ("eval_step", "number", "the step that made the evaluated version"),
    )

    def check(self, run: Run) -> None:
        config = self.config.section(EvaluationConfig)
        if config.tasks is None or run.offline is not None or run.method != "rl":
            return
        if not config.tasks.is_file():
            raise ConfigError(f"evaluation.tasks: there is no file {config.tasks}")
        if self.config.run.executor == "local":
            try:
                require_program(config.command)
            except ConfigError as error:
                raise ConfigError(f"evaluation.command: {error.message}") from None

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        if core.swap is None:
            yield TrainerHooks()
            return
        from .evaluator import Evaluator

        evaluator = Evaluator(core)
        await evaluator.evaluations.forget_broken_off()
        yield TrainerHooks(evaluate=evaluator.evaluate, keep=evaluator.keep)
        if (best := await evaluator.evaluations.best()) is not None:
            log.info("the best is %s; `lightning-proxy policy promote best` makes it live", best.story)


plugin = EvaluatingPlugin
