"""Runs the trainer: the core's loop, or a feature's replacement for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import ClientSession

from ..core.config.root import Config
from ..core.errors import ConfigError
from ..serving.mode import decide
from ..serving.swap import Swap
from ..serving.vllm import VllmFleet, operator_session
from ..store.opening import opened
from ..store.store import Store
from .collect.sampled import AsChat
from .functions import check_functions
from .lock import only_trainer, require_free, while_alone
from .loop import TrainingLoop
from .plugins import Run, TrainerCore, TrainerHooks, TrainerPlugin, open_plugins, plugins_of
from .publish import Publisher
from .step.engine import TrainingEngine
from .step.losses import check_gradients
from .step.trainer import LightningTrainer


async def train(config: Config, stop: asyncio.Event, run: Run | None = None, as_chat: AsChat | None = None) -> None:
    """Train on the configured store and vLLM until `stop` is set or the run is done. A feature may take over.

    `as_chat` turns recorded requests of other APIs into the chat requests that vLLM received for them.
    """
    run, plugins = run or Run(), plugins_of(config)
    for plugin in plugins:
        if await plugin.train(run, stop):
            return
    if config.policy_upstream is None:
        raise ConfigError("upstreams: the trainer needs an upstream of kind vllm")
    is_file = not config.store.is_postgres
    with only_trainer(config.policy.directory, config.store.path if is_file else None):
        async with opened(config.store) as database:
            if not is_file:
                await require_free(config, database)
            async with open_engine(config, plugins) as engine, operator_session() as session:

                async def work() -> None:
                    store = Store(database)
                    core = TrainerCore(config, store, engine, run, await swap_of(config, store, session))
                    async with open_plugins(plugins, core) as hooks:
                        await _train(core, hooks, stop, as_chat)

                await (work() if is_file else while_alone(config, database, stop, work))


async def swap_of(config: Config, store: Store, session: ClientSession) -> Swap:
    """Decide how weights are published and return what loads them into the policy's vLLM."""
    return Swap(store, VllmFleet.of(config, session), await decide(config, store, "trainer"), config.policy.directory)


async def _train(core: TrainerCore, hooks: TrainerHooks, stop: asyncio.Event, as_chat: AsChat | None) -> None:
    assert core.swap is not None
    publisher = hooks.publisher or Publisher(core.config.policy, core.store, core.swap, core.engine)
    if hooks.tune is not None:
        await hooks.tune(publisher, stop, hooks)
        return
    await TrainingLoop(core, publisher, hooks, as_chat=as_chat).run(stop, once=core.run.once)


def follow(config: Config) -> None:
    """Repeat the leading process's work until that process ends. All other processes of a launcher run this."""
    engine = engine_of(config, plugins_of(config))
    assert isinstance(engine, LightningTrainer)
    engine.processes.follow(engine)


@asynccontextmanager
async def open_engine(config: Config, plugins: Sequence[TrainerPlugin]) -> AsyncIterator[TrainingEngine]:
    """Yield a new engine, and `close` it after the block. If the block does not raise, `end` it first."""
    check_functions(config.trainer)
    check_gradients(config.trainer)
    engine = await asyncio.to_thread(engine_of, config, plugins)
    try:
        yield engine
        engine.end()
    finally:
        engine.close()


def engine_of(config: Config, plugins: Sequence[TrainerPlugin]) -> TrainingEngine:
    """Return a feature's engine, or else the single-process trainer."""
    engines = (plugin.engine() for plugin in plugins)
    return next(filter(None, engines), None) or LightningTrainer(config.trainer, config.policy)
