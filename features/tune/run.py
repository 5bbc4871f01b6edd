"""A run of fine-tuning on the store's rollouts: reads them, tunes the adapter, commits and publishes one step.

It claims no rollouts. Until it is committed, its own checkpoints are in `policy.directory`/METHOD/N, where N is the
step that it starts from.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any, Generic

from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...store.store import Store
from ...store.training import Step
from ...trainer.loop import TrainingLoop
from ...trainer.publish import NoPublisher
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Batch, Show, Sift, show_nothing
from ...trainer.waiting import in_thread, pause
from .config import TuneConfig
from .fit import Recipe, tune
from .lessons import Lessons, T

log = logging.getLogger(__name__)

NOTE = "run.json"


class TuningRun(Generic[T]):
    """One run of a method. If it is killed or stopped, the next one resumes from its checkpoint."""

    def __init__(
        self,
        recipe: Recipe[T],
        config: Config,
        store: Store,
        trainer: LightningTrainer,
        publisher: NoPublisher,
        show: Show = show_nothing,
        sift: Sift | None = None,
    ) -> None:
        self._recipe, self._method, self._sift = recipe, recipe.method, sift
        if config.policy.adapters:
            raise ConfigError(
                f"--method {self._method} trains one adapter for all agents: it is not for policy.adapters yet"
            )
        if config.trainer.has_guide:
            log.warning("teacher is for RL: --method %s does without it", self._method)
        self._config = config.trainer
        self._store = store
        self._trainer = trainer
        self._publisher = publisher
        self._loop = TrainingLoop(config, store, trainer, publisher, show=show)
        self._runs = config.policy.directory.absolute() / self._method

    async def run(self, stop: asyncio.Event) -> Step | None:
        """Fine-tune on the store's rollouts, commit, publish; returns the last step.

        Raises NothingToLearn without lessons. If the store cannot be written, waits for it.
        """
        while True:
            try:
                return await self._run(stop)
            except StoreUnavailable as error:
                log.error("the trainer waits: %s", error)
            await pause(stop)
            if stop.is_set():
                return None

    async def _run(self, stop: asyncio.Event) -> Step | None:
        await self._loop.resume(stop)
        if self._publisher.publishes:
            await self._go_on_from_what_is_live()
            await self._loop.verify_live()
        last = await self._store.steps.last()
        directory = self._runs / str(last.step if last else 0)
        if self._forget_other_runs(directory) and last is not None and last.metrics.get("method") == self._method:
            log.info("the run that was stopped while step %d was published is finished", last.step)
            return last
        started = time.perf_counter()
        lessons = await self._lessons(directory)
        metrics: dict[str, Any] = {
            "method": self._method, **lessons.metrics, "collect_s": time.perf_counter() - started
        }  # fmt: skip
        me = asyncio.current_task()
        assert me is not None

        def stopped() -> bool:
            return stop.is_set() or me.cancelling() > 0

        tuned = await in_thread(tune, self._recipe, self._trainer, lessons, directory, stopped)
        if tuned is None:
            log.warning("stopped: the same command resumes from the checkpoint in %s", directory)
            return last
        await self._conclude(lessons, metrics | tuned, directory)
        return await self._store.steps.last()

    async def _go_on_from_what_is_live(self) -> None:
        """Take over the live weights. Raises LightningError if publication is stopped because of a collapse."""
        if await self._loop.is_stopped():
            collapse = await self._store.steps.collapse()
            raise LightningError(f"publication is stopped: {collapse.story if collapse else 'the policy collapsed'}")
        await self._loop.follow_live_version()

    async def _conclude(self, lessons: Lessons[T], metrics: dict[str, Any], directory: Path) -> None:
        step = await self._store.steps.claim((), self._loop.base)
        self._trainer.adopt(step)
        await self._loop.conclude(Batch(step, lessons.samples, ()), metrics)
        await self._loop.verify_live()
        if "publish_s" in metrics:  # not stopped before
            shutil.rmtree(directory, ignore_errors=True)

    async def _lessons(self, directory: Path) -> Lessons[T]:
        """The lessons of an unfinished run in `directory`, if it can be resumed; else new ones."""
        section = getattr(self._config.section(TuneConfig), self._method).model_dump(mode="json")
        settings = {"base": self._loop.base, "seed": self._config.seed, **section}
        if (directory / NOTE).is_file():
            note = json.loads((directory / NOTE).read_text())
            if note["settings"] == settings and (lessons := await self._again(note)) is not None:
                log.info("resuming the run in %s", directory)
                return lessons
            log.warning("the run in %s begins anew: its rollouts, settings or weights have changed", directory)
            shutil.rmtree(directory)
        lessons = await self._recipe.read(self._store, self._trainer, self._sift, None)
        directory.mkdir(parents=True, exist_ok=True)
        note = {"settings": settings, "rollouts": lessons.rollout_ids, "digest": lessons.digest}
        part = directory / f".{NOTE}.part"
        part.write_text(json.dumps(note))
        part.replace(directory / NOTE)
        return lessons

    async def _again(self, note: dict[str, Any]) -> Lessons[T] | None:
        """The rows that a run began with; None if they are different now."""
        try:
            lessons = await self._recipe.read(self._store, self._trainer, self._sift, set(note["rollouts"]))
        except LightningError:
            return None
        return lessons if lessons.digest == note["digest"] else None

    def _forget_other_runs(self, directory: Path) -> bool:
        """Remove runs that began at other steps. Returns whether there were any."""
        others = [path for path in self._runs.glob("*") if path != directory]
        for path in others:
            shutil.rmtree(path, ignore_errors=True)
        return bool(others)
