"""Adds fine-tuning (`train --method sft`, `dpo` and `kto`), and training without a server (`train --offline`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...store.training import Step
from ...trainer.plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin
from ...trainer.report.metric_schema import group

if TYPE_CHECKING:
    from ...trainer.publish import Publisher

METRICS = {
    **group(
        "sft",
        ("held_out_loss_before", "nats", "mean cross-entropy of the answers' tokens of held-out tasks, before the run"),
        ("held_out_loss", "nats", "the same after the run"),
        ("token_accuracy", "share", "trained tokens that were the likeliest; mean over the last epoch"),
        ("calls_untokenised", "count", "other models' calls that the policy's chat template cannot render"),
    ),
    **group(
        "dpo",
        ("pairs", "count", "pairs that are trained on"),
        ("pairs_held_out", "count", "pairs of held-out tasks"),
        ("pairs_other_prompt", "count", "pairs not trained on: their prompts differ"),
        ("preference_margin", "1", "beta times the increase of the log-odds; mean over the last epoch"),
        ("preference_accuracy", "share", "pairs with log-odds that increased; mean over the last epoch"),
    ),
    **group(
        "kto",
        ("thumbs_up", "count", "training rows of rollouts with thumbs up"),
        ("thumbs_down", "count", "training rows of rollouts with thumbs down"),
    ),
    **group(
        "preferences",
        ("held_out_accuracy_before", "share", "held-out comparisons won by the better answer, before the run"),
        ("held_out_accuracy", "share", "the same after the run"),
        ("held_out_margin_before", "nats", "mean log-probability of better minus worse held-out answers, before"),
        ("held_out_margin", "nats", "the same after the run"),
    ),
}  # fmt: skip


class TunePlugin(TrainerPlugin):
    methods = ("sft", "dpo", "kto")
    metrics = METRICS

    def check(self, run: Run) -> None:
        if run.method in self.methods and run.launched:
            raise ConfigError(f"--method {run.method} runs in one process: start it without a launcher")
        if run.offline is None:
            from .data import check_store

            check_store(self.config)

    async def train(self, run: Run, stop: asyncio.Event) -> bool:
        if run.offline is None:
            return False
        from .offline import train_offline

        await train_offline(self.config, run, run.offline, stop)
        return True

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        async def tune(publisher: Publisher | None, stop: asyncio.Event, hooks: TrainerHooks) -> Step | None:
            from .run import TuningRun

            return await TuningRun(core.run.method, core, publisher, hooks).run(stop)

        yield TrainerHooks(tune=tune if core.run.method in self.methods else None)


plugin = TunePlugin
