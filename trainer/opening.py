"""Opens the training engine: a side room's, or a trainer in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ..proxy.config.root import Config
from ..proxy.config.trainer import TrainerConfig
from .credit.strategies import STRATEGIES
from .hooks import load
from .plugins.hooks import TrainerPlugin
from .step.engine import TrainingEngine
from .step.trainer import LightningTrainer


@asynccontextmanager
async def open_engine(config: Config, plugins: Sequence[TrainerPlugin]) -> AsyncIterator[TrainingEngine]:
    """Make the engine, and end it."""
    check_hooks(config.trainer)
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


def check_hooks(config: TrainerConfig) -> None:
    """Raise ConfigError if a function of the user's own cannot be had, before a model is loaded."""
    for name in {config.credit} if isinstance(config.credit, str) else {*config.credit.values()}:
        if name not in STRATEGIES:
            load("trainer.credit", name)
    if config.loss is not None:
        load("trainer.loss", config.loss)
    if config.context_loss is not None:
        load("trainer.context_loss", config.context_loss)
