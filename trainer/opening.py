"""Opens the training engine: a side room's, or a trainer in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ..core.config.root import Config
from .hooks import check_hooks
from .plugins.hooks import TrainerPlugin
from .step.engine import TrainingEngine
from .step.own_loss import check_gradients
from .step.trainer import LightningTrainer


@asynccontextmanager
async def open_engine(config: Config, plugins: Sequence[TrainerPlugin]) -> AsyncIterator[TrainingEngine]:
    """Make the engine, and end it."""
    check_hooks(config.trainer)
    check_gradients(config.trainer)
    engine = await asyncio.to_thread(engine_of, config, plugins)
    try:
        yield engine
        engine.end()
    finally:
        engine.close()


def engine_of(config: Config, plugins: Sequence[TrainerPlugin]) -> TrainingEngine:
    """Return a side room's engine; without one, a trainer in this process alone."""
    for plugin in plugins:
        if (engine := plugin.engine()) is not None:
            return engine
    return LightningTrainer(config.trainer, config.policy)
