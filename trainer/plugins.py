"""What a feature adds to the trainer: methods, metrics, an engine, and hooks.

This module and the features' `trainer` modules are imported before torch is needed, so only their functions import it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..core.config.root import Config
from ..core.errors import ConfigError
from ..core.features import modules
from ..serving.swap import Swap
from ..store.store import Store
from ..store.training import Step
from .report.metric_schema import Metric
from .types import Guide, Show, Sift

if TYPE_CHECKING:
    from .publish import Publisher
    from .step.engine import TrainingEngine

# Does all training of a run in place of the loop, and publishes it; returns the last step.
Tune = Callable[["Publisher | None", asyncio.Event, "TrainerHooks"], Awaitable[Step | None]]


@dataclass(frozen=True, slots=True)
class Offline:
    """An offline run. Without `data` it uses the configured store; without `directory`, one next to the policy's."""

    data: Path | None = None
    directory: Path | None = None
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """The requested run. `once`: train on what is ready, then end. `launched`: this is one of several processes."""

    method: str = "rl"
    once: bool = False
    offline: Offline | None = None
    launched: bool = False
    show: Show | None = None


@dataclass(frozen=True, slots=True)
class TrainerCore:
    """What a feature gets when the trainer opens. Without a `swap`, no weights are published."""

    config: Config
    store: Store
    engine: TrainingEngine
    run: Run
    swap: Swap | None = None


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """A feature's hooks in the trainer. No two features may have the same hook.

    `guide` adds guidance to a step's samples, such as a teacher's log-probabilities. `publisher` decides whether and
    how new weights go live. `tune` trains in place of the loop. `sift` excludes calls of a rollout, or gives them a
    negative advantage. `evaluate` runs between steps: it calls its second argument to verify the live version, and
    stops once the event is set. `keep` returns versions that must keep their files.
    """

    guide: Guide | None = None
    publisher: Publisher | None = None
    tune: Tune | None = None
    sift: Sift | None = None
    evaluate: Callable[[asyncio.Event, Callable[[], Awaitable[object]]], Awaitable[None]] | None = None
    keep: Callable[[], Awaitable[set[int]]] | None = None


NO_HOOKS = TrainerHooks()


class TrainerPlugin:
    """What a feature adds to the trainer. `methods`: the values of `--method` that its hook `tune` handles.

    `metrics`: what it adds to the metrics of a step.
    """

    methods: ClassVar[Sequence[str]] = ()
    metrics: ClassVar[Mapping[str, Metric]] = {}

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, run: Run) -> None:
        """Raise ConfigError if this run cannot be done. Called before anything is loaded."""

    def engine(self) -> TrainingEngine | None:
        """Return an engine to use in place of the single-process trainer; None if the feature has none."""

    async def train(self, run: Run, stop: asyncio.Event) -> bool:
        """Do a run that does not use the configured store and vLLM. Return False if the run is not this feature's."""
        return False

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        """Yield the hooks. At the block's end, after the last step, close what was opened."""
        yield NO_HOOKS


def methods() -> list[str]:
    return ["rl", *(method for module in modules("trainer") for method in module.plugin.methods)]


def plugins_of(config: Config) -> list[TrainerPlugin]:
    return [module.plugin(config) for module in modules("trainer")]


def check(config: Config, run: Run) -> None:
    """Raise ConfigError if a feature cannot do what the run asks for."""
    for plugin in plugins_of(config):
        plugin.check(run)


@asynccontextmanager
async def open_plugins(plugins: Sequence[TrainerPlugin], core: TrainerCore) -> AsyncIterator[TrainerHooks]:
    """Open plugins in order, yield their hooks, and close them in reverse. Raises ConfigError if two share a hook."""
    async with AsyncExitStack() as stack:
        hooks = NO_HOOKS
        for plugin in plugins:
            of_plugin = await stack.enter_async_context(plugin.opened(core))
            for name in (field.name for field in fields(of_plugin) if getattr(of_plugin, field.name) is not None):
                if getattr(hooks, name) is not None:
                    raise ConfigError(f"2 features have the trainer's hook {name}, but only one may: turn one off")
                hooks = replace(hooks, **{name: getattr(of_plugin, name)})
        yield hooks
