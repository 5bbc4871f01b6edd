"""Plugs methods of fine-tuning in: what the rooms of `sft` and of preferences share."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ...proxy.errors import ConfigError
from ...proxy.store.training import Step
from ..plugins.hooks import Run, TrainerCore, TrainerHooks, TrainerPlugin
from ..types import Sift

if TYPE_CHECKING:
    from ..publish import NoPublisher
    from .fit import Recipe


class TuningPlugin(TrainerPlugin):
    """A side room with methods of fine-tuning."""

    @abstractmethod
    def recipe(self, method: str) -> Recipe[Any]:
        """Return the recipe of one of `methods`."""

    def check(self, run: Run) -> None:
        if run.method in self.methods and run.launched:
            raise ConfigError(f"--method {run.method} runs in one process: start it without a launcher")

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        async def tune(publisher: NoPublisher, stop: asyncio.Event, sift: Sift | None) -> Step | None:
            from ..step.trainer import LightningTrainer
            from .run import TuningRun

            assert isinstance(core.engine, LightningTrainer)
            recipe = self.recipe(core.run.method)
            return await TuningRun(recipe, core.config, core.store, core.engine, publisher, core.run.show, sift).run(
                stop
            )

        yield TrainerHooks(tune=tune if core.run.method in self.methods else None)
