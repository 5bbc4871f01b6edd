"""A run of fine-tuning on the store's rollouts: reads lessons, tunes the weights, commits and publishes one step.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ...commands.files import written
from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...store.training import Step
from ...trainer.loop import TrainingLoop
from ...trainer.plugins import NO_HOOKS, TrainerCore, TrainerHooks
from ...trainer.publish import Publisher
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Batch
from ...trainer.waiting import Stopped, in_thread, pause
from ...trainer.weights import MARKER, uses_autocast
from .config import TuneConfig
from .lessons import LessonReader, Lessons
from .methods import METHODS, measured

log = logging.getLogger(__name__)
NOTE = "run.json"
SAVES = 10  # checkpoints in a run


class TuningRun:
    """One run of a method. If it is killed or stopped, the next one resumes from its checkpoint."""

    def __init__(
        self, method: str, core: TrainerCore, publisher: Publisher | None, hooks: TrainerHooks = NO_HOOKS
    ) -> None:
        config, trainer = core.config, core.engine
        assert isinstance(trainer, LightningTrainer)
        if config.policy.adapters:
            raise ConfigError(f"--method {method} trains one adapter for all agents: it is not for policy.adapters yet")
        if config.trainer.has_guide:
            log.warning("teacher is for RL: --method %s does without it", method)
        self._method, self._config, self._sift = method, config.trainer, hooks.sift
        self._store, self._trainer, self._publisher = core.store, trainer, publisher
        self._loop = TrainingLoop(core, publisher, hooks)
        self._runs = config.policy.directory.absolute() / method

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
            if await self._loop.is_stopped():
                collapse = await self._store.steps.collapse()
                why = collapse.story if collapse else "the policy collapsed"
                raise LightningError(f"publication is stopped: {why}")
            await self._loop.follow_live_version()
            await self._loop.verify_live()
        last = await self._store.steps.last()
        directory = self._runs / str(last.step if last else 0)
        earlier = [path for path in self._runs.glob("*") if path != directory]
        for path in earlier:
            shutil.rmtree(path, ignore_errors=True)
        if earlier and last is not None and last.metrics.get("method") == self._method:
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

        tuned = await in_thread(tune, self._method, self._trainer, lessons, directory, stopped)
        if tuned is None:
            log.warning("stopped: the same command resumes from the checkpoint in %s", directory)
            return last
        step = await self._store.steps.claim((), self._loop.base)
        self._trainer.adopt(step)
        # vLLM answers the prompts of each lesson's first row when the new weights are verified.
        await self._loop.conclude(Batch(step, tuple(one.rows[0] for one in lessons.train), ()), metrics | tuned)
        await self._loop.verify_live()
        shutil.rmtree(directory, ignore_errors=True)
        return await self._store.steps.last()

    async def _lessons(self, directory: Path) -> Lessons:
        """The lessons of an unfinished run in `directory`, if it can be resumed; else new ones."""
        reader = LessonReader(self._method, self._store, self._trainer, self._sift)
        section = getattr(self._config.section(TuneConfig), self._method).model_dump(mode="json")
        settings = {"base": self._loop.base, "seed": self._config.seed, **section}
        if (directory / NOTE).is_file():
            note = json.loads((directory / NOTE).read_text())
            if note["settings"] == settings:
                try:
                    lessons = await reader.read(set(note["rollouts"]))
                except LightningError:
                    lessons = None
                if lessons is not None and lessons.digest == note["digest"]:
                    log.info("resuming the run in %s", directory)
                    return lessons
            log.warning("the run in %s starts over: its rollouts, settings or weights have changed", directory)
            shutil.rmtree(directory)
        lessons = await reader.read()
        directory.mkdir(parents=True, exist_ok=True)
        note = {"settings": settings, "rollouts": lessons.rollout_ids, "digest": lessons.digest}
        with written(directory / NOTE) as part:
            part.write_text(json.dumps(note))
        return lessons


class FitCallback(TrainerCallback):
    """Ends the run on request, marks complete checkpoints, and logs every epoch.

    Each checkpoint holds the numbers up to its own step, so that a run that is killed ends with the same ones.
    """

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stopped() and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / MARKER).touch()
        log.info("%d of %d optimizer steps", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" not in logs:  # TRL's summary of the run
            return
        entry, now = state.log_history[-1], time.perf_counter()
        entry["seconds"], self._since = now - self._since, now
        if float(entry["epoch"]).is_integer():
            loss = fmean(one["loss"] for one in last_epoch(state.log_history))
            log.info("epoch %d of %d: loss %.4g", entry["epoch"], args.num_train_epochs, loss)


def tune(
    method: str, trainer: LightningTrainer, lessons: Lessons, directory: Path, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Train `trainer`'s weights on the lessons; returns metrics, or None if it was stopped before the end.

    Resumes from the newest checkpoint in `directory`. Raises LightningError if the loss or the weights are not finite.
    """
    how, section = METHODS[method], getattr(trainer.settings.section(TuneConfig), method)
    before = measured(method, trainer, lessons.held_out)
    rows = how.rows(trainer, lessons.train)
    tuner = how.trainer(
        model=trainer.model,
        args=how.settings(**_arguments(trainer, section, directory) | rows.settings),
        data_collator=how.collate,
        train_dataset=rows.dataset,
        processing_class=trainer.tokenizer,
        callbacks=[FitCallback(stopped)],
    )
    for callback in (PrinterCallback, ProgressCallback):
        tuner.remove_callback(callback)
    # The newest checkpoint that was written to the end.
    complete = [path.parent for path in directory.glob(f"checkpoint-*/{MARKER}")]
    newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    tuner.train(resume_from_checkpoint=newest and str(newest))
    if tuner.state.global_step < tuner.state.max_steps:
        return None
    logs = [entry for entry in tuner.state.log_history if "loss" in entry]
    last, seconds = logs[-1], math.fsum(entry["seconds"] for entry in logs)
    means = {
        ours: fmean(one[name] for one in last_epoch(logs)) for ours, name in {"loss": "loss", **how.logged}.items()
    }
    if not (math.isfinite(means["loss"]) and all(torch.isfinite(v).all() for v in trainer.adapter().values())):
        shutil.rmtree(directory, ignore_errors=True)
        raise LightningError(
            f"fine-tuning diverged (loss {means['loss']:g}): nothing of it is kept; try a lower "
            f"tune.{method}.learning_rate"
        )
    trained = section.epochs * sum(row.trained_tokens for one in lessons.train for row in one.rows)
    computed = section.epochs * rows.computed
    return {
        **means,
        "grad_norm": last["grad_norm"],
        "lr": section.learning_rate,
        "epochs": float(section.epochs),
        "optimizer_steps": float(tuner.state.max_steps),
        "skipped": 0.0,
        "trained_tokens": float(trained),
        "computed_tokens": float(computed),
        "trained_tokens_per_s": trained / seconds,
        "computed_tokens_per_s": computed / seconds,
        "step_s": seconds,
        **{f"held_out_{name}_before": value for name, value in before.items()},
        **{f"held_out_{name}": value for name, value in measured(method, trainer, lessons.held_out).items()},
    }


def last_epoch(history: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the logs of the last epoch's optimizer steps."""
    logs = [entry for entry in history if "loss" in entry]
    return [entry for entry in logs if math.ceil(entry["epoch"]) == math.ceil(logs[-1]["epoch"])]


def _arguments(trainer: LightningTrainer, section: Any, directory: Path) -> dict[str, Any]:
    """TRL's settings of every method."""
    cuda = torch.cuda.is_available()
    return {
        "output_dir": str(directory),
        "use_cpu": not cuda,
        "bf16": uses_autocast(trainer.settings),
        "gradient_checkpointing": cuda,
        "per_device_train_batch_size": 1,
        "num_train_epochs": section.epochs,
        "learning_rate": section.learning_rate,
        "lr_scheduler_type": "linear",
        "max_grad_norm": trainer.settings.max_grad_norm,
        "seed": trainer.settings.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": 1 / SAVES,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }
