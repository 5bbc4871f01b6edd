"""Defines what a side room of the trainer is: methods, an engine, and hooks that are named after what happens.

This module and the rooms' `plugin` modules are read before torch may be loaded, so they import it in their functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...core.config.root import Config
from ...serving.swap import Swap
from ...store.store import Store
from ...store.training import Step
from ..types import BesideSteps, Guide, Show, Sift, show_nothing

if TYPE_CHECKING:
    from ..collect.siblings import AskJudge
    from ..publish import NoPublisher, Publisher
    from ..step.engine import TrainingEngine

# Does all training of a run in place of the loop, and publishes it; returns the last step.
Tune = Callable[["NoPublisher", asyncio.Event, Sift | None], Awaitable[Step | None]]


@dataclass(frozen=True, slots=True)
class Offline:
    """The `data` to train on (None: the configured store), its `directory` (None: beside the policy's), its epochs."""

    data: Path | None = None
    directory: Path | None = None
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """What a user asks the trainer for. `once`: train on what is ready, and end. `launched`: with other processes.

    `file`: the one that the configuration was read from, for programs of ours that are started with it.
    """

    method: str = "rl"
    once: bool = False
    offline: Offline | None = None
    launched: bool = False
    show: Show = show_nothing
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class TrainerCore:
    """What a side room gets when the trainer opens. Without a `swap` no weights are published."""

    config: Config
    store: Store
    engine: TrainingEngine
    run: Run
    swap: Swap | None = None


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """What a side room does in the trainer. Each hook is at most one room's.

    `judge` scores the calls of a rollout before its group is compared. `guide` says more of a step's tokens than their
    rewards do. `publisher` decides whether and how new weights go live. `tune` is a method of fine-tuning.
    `sift` leaves calls of a rollout out, or pushes them down. `beside` works beside the steps, and keeps versions.
    """

    judge: AskJudge | None = None
    guide: Guide | None = None
    publisher: Publisher | None = None
    tune: Tune | None = None
    beside: BesideSteps | None = None
    sift: Sift | None = None


class TrainerPlugin:
    """A side room of the trainer. `methods` are the values of `--method` that it has the hook `tune` for."""

    methods: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, run: Run) -> None:
        """Raise ConfigError if this run cannot be done. Nothing is loaded yet."""

    def engine(self) -> TrainingEngine | None:
        """Return what takes the steps in place of a trainer in this process alone; None for any other room."""

    async def train(self, run: Run, stop: asyncio.Event) -> bool:
        """Do a run that is not on the configured store and vLLM. Return False if it is another room's, or none's."""
        return False

    @asynccontextmanager
    async def opened(self, core: TrainerCore) -> AsyncIterator[TrainerHooks]:
        """Yield the hooks. What it opened closes at the block's end, after the last step."""
        yield TrainerHooks()
