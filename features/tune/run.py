"""A run of fine-tuning on the store's rollouts: reads them, tunes the adapter, commits and publishes one step.

It claims no rollouts. Until it is committed, its own checkpoints are in `policy.directory`/METHOD/N, where N is the
step that it starts from.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...store.store import Store
from ...store.training import Step
from ...trainer.loop import TrainingLoop
from ...trainer.plugins import TrainerCore
from ...trainer.publish import Publisher
from ...trainer.rate import warn_of_rate
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Batch, Sift
from ...trainer.waiting import Stopped, in_thread, pause
from ...trainer.weights import MARKER, uses_autocast
from .config import TuneConfig
from .lessons import Lessons, T

log = logging.getLogger(__name__)
NOTE = "run.json"
SAVES = 10  # checkpoints in a run


class TuningRun(Generic[T]):
    """One run of a method. If it is killed or stopped, the next one resumes from its checkpoint."""

    def __init__(
        self,
        recipe: Recipe[T],
        core: TrainerCore,
        publisher: Publisher | None,
        sift: Sift | None = None,
    ) -> None:
        self._recipe, self._method, self._sift = recipe, recipe.method, sift
        config, trainer = core.config, core.engine
        assert isinstance(trainer, LightningTrainer)
        if config.policy.adapters:
            raise ConfigError(
                f"--method {self._method} trains one adapter for all agents: it is not for policy.adapters yet"
            )
        if config.trainer.has_guide:
            log.warning("teacher is for RL: --method %s does without it", self._method)
        self._config = config.trainer
        self._store = core.store
        self._trainer = trainer
        self._publisher = publisher
        self._loop = TrainingLoop(core, publisher)
        self._runs = config.policy.directory.absolute() / self._method

    async def run(self, stop: asyncio.Event) -> Step | None:
        """Fine-tune on the store's rollouts, commit, publish; returns the last step.

        Raises NothingToLearn without lessons. If the store cannot be written, waits for it.
        """
        while True:
            try:
                return await self._run(stop)
            except Stopped:
                log.warning("stopped: the same command goes on from there")
            except StoreUnavailable as error:
                log.error("the trainer waits: %s", error)
            await pause(stop)
            if stop.is_set():
                return None

    async def _run(self, stop: asyncio.Event) -> Step | None:
        await self._loop.resume(stop)
        if self._publisher is not None:
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


class FitCallback(TrainerCallback):
    """Ends the run on request, marks complete checkpoints, and logs every epoch.

    Each checkpoint holds the numbers up to its own step, so that a run that is killed ends with the same ones.
    `measure` returns the numbers of held-out tasks, which go into the log of each epoch.
    """

    def __init__(self, stopped: Callable[[], bool], measure: Callable[[], dict[str, float]]) -> None:
        self._stopped = stopped
        self._measure = measure
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stopped() and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
        control.should_log = control.should_log or control.should_save

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / MARKER).touch()
        log.info("%d of %d optimizer steps", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" not in logs:  # TRL's summary of the run
            return
        entry, now = state.log_history[-1], time.perf_counter()
        entry["seconds"], self._since = now - self._since, now
        if float(entry["epoch"]).is_integer():
            measured = self._measure()
            entry.update(measured)
            numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in measured.items())
            held_out = f" ({numbers})" if numbers else ""
            loss = last_epoch(state.log_history)["loss"]
            log.info("epoch %.3g of %d: loss %.4g%s", entry["epoch"], args.num_train_epochs, loss, held_out)


@dataclass(frozen=True, slots=True)
class Recipe(Generic[T]):
    """The parts in which methods of fine-tuning differ. The configuration has a section of the method's name.

    `read` returns the lessons of all rollouts, or of some; it raises NothingToLearn without any. `tuner` makes TRL's
    trainer, and tells how many tokens it computes in an epoch. `measure` returns the numbers of lessons under the
    present weights, and `learned` further metrics from the last epoch's log.
    """

    method: str
    read: Callable[[Store, LightningTrainer, Sift | None, Collection[str] | None], Awaitable[Lessons[T]]]
    tuner: Callable[[LightningTrainer, Sequence[T], Path, FitCallback], tuple[Trainer, int]]
    measure: Callable[[LightningTrainer, Sequence[T]], dict[str, float]]
    learned: Callable[[Mapping[str, float]], dict[str, float]] = lambda last: {}


def tune(
    recipe: Recipe[T], trainer: LightningTrainer, lessons: Lessons[T], directory: Path, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Train `trainer`'s adapter on the lessons; returns metrics, or None if it was stopped before the end.

    Resumes from the newest checkpoint in `directory`. Raises LightningError if the loss or the weights are not finite.
    """

    def held_out() -> dict[str, float]:
        return {f"held_out_{name}": value for name, value in recipe.measure(trainer, lessons.held_out).items()}

    section = getattr(trainer.settings.section(TuneConfig), recipe.method)
    before = {f"{name}_before": value for name, value in held_out().items()}
    tuner, computed = recipe.tuner(trainer, lessons.train, directory, FitCallback(stopped, held_out))
    last = fit(trainer, tuner, directory, f"tune.{recipe.method}.learning_rate")
    if last is None:
        return None
    trained = sum(row.trained_tokens for row in lessons.rows)
    common = tuning_metrics(last, epochs=section.epochs, rate=section.learning_rate, trained=trained, computed=computed)
    after = {name: value for name, value in last.items() if name.startswith("held_out_")}
    return {**common, **recipe.learned(last), **before, **after}


def fit(trainer: LightningTrainer, tuner: Trainer, directory: Path, rate: str) -> dict[str, float] | None:
    """Train to the end, from the newest checkpoint in `directory` on; returns the last epoch's log, or None if stopped.

    Raises LightningError, which names the setting `rate`, if the loss or the weights are not finite.
    """
    for callback in (PrinterCallback, ProgressCallback):
        tuner.remove_callback(callback)
    tuner.train(resume_from_checkpoint=_newest_checkpoint(directory))
    if tuner.state.global_step < tuner.state.max_steps:
        return None
    last = last_epoch(tuner.state.log_history)
    if not (math.isfinite(last["loss"]) and all(torch.isfinite(v).all() for v in trainer.adapter().values())):
        shutil.rmtree(directory, ignore_errors=True)
        raise LightningError(f"fine-tuning diverged (loss {last['loss']:g}): nothing of it is kept; try a lower {rate}")
    return {**last, "optimizer_steps": float(tuner.state.max_steps)}


def last_epoch(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the newest log, with means over its epoch's steps; `seconds` are the entire run's.

    A log is of the steps since the one before it: two steps with loss 1, then one with loss 4, make a mean of 2.
    """
    logs = [entry for entry in history if "loss" in entry]
    before = [0.0, *(entry["step"] for entry in logs)]
    epoch = [
        (entry["step"] - start, entry)
        for start, entry in zip(before, logs, strict=False)
        if math.ceil(entry["epoch"]) == math.ceil(logs[-1]["epoch"])
    ]
    steps = sum(count for count, _ in epoch)
    shared = set.intersection(*(set(entry) for _, entry in epoch)) - {"step", "epoch", "grad_norm"}
    means = {name: math.fsum(count * entry[name] for count, entry in epoch) / steps for name in shared}
    return {**logs[-1], **means, "seconds": math.fsum(entry.get("seconds", 0.0) for entry in logs)}


def tuning_metrics(
    last: dict[str, float], *, epochs: int, rate: float, trained: int, computed: int
) -> dict[str, float]:
    """Return the metrics that every method has; `trained` and `computed` are an epoch's tokens."""
    seconds = last["seconds"]
    return {
        "loss": last["loss"],
        "grad_norm": last["grad_norm"],
        "lr": rate,
        "epochs": float(epochs),
        "optimizer_steps": last["optimizer_steps"],
        "skipped": 0.0,
        "trained_tokens": float(epochs * trained),
        "computed_tokens": float(epochs * computed),
        "trained_tokens_per_s": epochs * trained / seconds,
        "computed_tokens_per_s": epochs * computed / seconds,
        "step_s": seconds,
    }


def arguments(
    trainer: LightningTrainer, method: str, directory: Path, *, passes: int = 1, together: int = 1
) -> dict[str, Any]:
    """Return TRL's settings of a run of `passes` forward passes in an optimizer step, each of so many rows or pairs."""
    config, section, cuda = (
        trainer.settings,
        getattr(trainer.settings.section(TuneConfig), method),
        torch.cuda.is_available(),
    )
    warn_of_rate(config, section.learning_rate)
    return {
        "output_dir": str(directory),
        "use_cpu": not cuda,
        "bf16": uses_autocast(config),
        "gradient_checkpointing": cuda,
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": passes,
        "num_train_epochs": section.epochs,
        "learning_rate": section.learning_rate,
        "lr_scheduler_type": "linear",
        "max_grad_norm": config.max_grad_norm,
        "seed": config.seed,
        "logging_strategy": "epoch",
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": 1 / SAVES,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }


def _newest_checkpoint(directory: Path) -> str | None:
    """The newest checkpoint that was written to the end."""
    complete = [path.parent for path in directory.glob(f"checkpoint-*/{MARKER}")]
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None
