"""`train --method sft`: fine-tunes the adapter on the best rollouts of the store, with TRL's SFTTrainer.

A run is one training step, published as one policy version. It claims no rollouts. Until it is committed, its own
checkpoints are in `policy.directory`/sft/N, where N is the step that it goes on from.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from ...proxy.config.root import Config
from ...proxy.config.trainer import TrainerConfig
from ...proxy.errors import ConfigError, LightningError, StoreUnavailable
from ...proxy.store.store import Store
from ...proxy.store.training import Step
from ..files.weights import MARKER
from ..loop import Show, TrainingLoop, show_nothing
from ..offline.offline import EPOCHS_DONE
from ..publish import Publisher
from ..step.trainer import LightningTrainer
from ..types import Batch, Sample
from ..waiting import pause
from .traces import TraceReader, Traces

log = logging.getLogger(__name__)

METHOD = "sft"  # the metric `method` of its step
NOTE = "run.json"
IGNORED = -100  # the label of a token that is not in the loss
SAVES = 10  # checkpoints in a run
# Rows are packed into blocks of so many tokens, or as long as the longest row. Attention costs a block's square.
BLOCK_TOKENS = 1024


class SftRun:
    """One run of supervised fine-tuning. If it is killed or stopped, the next one goes on from its checkpoint.

    With `publisher` None, it is not published.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        trainer: LightningTrainer,
        publisher: Publisher | None,
        show: Show = show_nothing,
    ) -> None:
        if config.policy.adapters:
            raise ConfigError("--method sft trains one adapter for all agents: it is not for policy.adapters yet")
        self._config = config.trainer
        self._store = store
        self._trainer = trainer
        self._publisher = publisher
        self._loop = TrainingLoop(config, store, trainer, publisher, show=show)
        tokenizer = trainer.processing_class
        self._reader = TraceReader(config.trainer, store, tokenizer, trainer.max_tokens, trainer.vocabulary)
        self._runs = config.policy.directory.absolute() / METHOD

    async def run(self, stop: asyncio.Event) -> Step | None:
        """Fine-tune on what the store has now, commit, publish; returns the last step.

        Raises NothingToLearn without traces. If the store cannot be written, waits for it.
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
        if self._publisher is not None:
            await self._go_on_from_what_is_live()
        last = await self._store.steps.last()
        directory = self._runs / str(last.step if last else 0)
        if self._forget_other_runs(directory) and last is not None and last.metrics.get("method") == METHOD:
            log.info("the run that was stopped while step %d was published is finished", last.step)
            return last
        started = time.perf_counter()
        traces = await self._traces(directory)
        metrics: dict[str, Any] = {"method": METHOD, **traces.metrics, "collect_s": time.perf_counter() - started}
        if last is not None and EPOCHS_DONE in last.metrics:  # of RL offline, which goes on counting
            metrics[EPOCHS_DONE] = last.metrics[EPOCHS_DONE]
        tuned = await asyncio.to_thread(fine_tune, self._trainer, traces, directory, stop.is_set)
        if tuned is None:
            log.warning("stopped: the same command goes on from the checkpoint in %s", directory)
            return last
        await self._conclude(traces, metrics | tuned, directory)
        return await self._store.steps.last()

    async def _go_on_from_what_is_live(self) -> None:
        """Take over the live weights. Raises LightningError if publication is stopped because of a collapse."""
        if await self._loop.is_stopped():
            collapse = await self._store.steps.collapse()
            raise LightningError(f"publication is stopped: {collapse.story if collapse else 'the policy collapsed'}")
        await self._loop.follow_live_version()

    async def _conclude(self, traces: Traces, metrics: dict[str, Any], directory: Path) -> None:
        step = await self._store.steps.claim((), self._loop.version)
        self._trainer.adopt(step)
        await self._loop.conclude(Batch(step, traces.train, ()), metrics)
        if "publish_s" in metrics:  # not stopped before
            shutil.rmtree(directory, ignore_errors=True)

    async def _traces(self, directory: Path) -> Traces:
        """The traces of an unfinished run in `directory`, if it can go on; else the best of now."""
        settings = {"base": self._loop.version, "seed": self._config.seed, **self._config.sft.model_dump(mode="json")}
        if (directory / NOTE).is_file():
            note = json.loads((directory / NOTE).read_text())
            if note["settings"] == settings and (traces := await self._again(note)) is not None:
                log.info("going on with the run in %s", directory)
                return traces
            log.warning("the run in %s begins anew: its rollouts, settings or weights have changed", directory)
            shutil.rmtree(directory)
        traces = await self._reader.read()
        directory.mkdir(parents=True, exist_ok=True)
        note = {"settings": settings, "rollouts": traces.rollout_ids, "digest": traces.digest}
        part = directory / f".{NOTE}.part"
        part.write_text(json.dumps(note))
        part.replace(directory / NOTE)
        return traces

    async def _again(self, note: dict[str, Any]) -> Traces | None:
        """The rows that a run began with; None if they are different now."""
        try:
            traces = await self._reader.read(set(note["rollouts"]))
        except LightningError:
            return None
        return traces if traces.digest == note["digest"] else None

    def _forget_other_runs(self, directory: Path) -> bool:
        """Remove runs that went on from other steps. Returns whether there were any."""
        others = [path for path in self._runs.glob("*") if path != directory]
        for path in others:
            shutil.rmtree(path, ignore_errors=True)
        return bool(others)


def fine_tune(
    trainer: LightningTrainer, traces: Traces, directory: Path, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Train `trainer`'s adapter on the traces; returns metrics, or None if it was stopped before the end.

    Goes on from the newest checkpoint in `directory`. Raises LightningError if the loss or the weights are not finite.
    """
    started = time.perf_counter()
    before = mean_loss(trainer, traces.held_out)
    packing = Packing.of(traces.train, trainer.settings.sft.batch_tokens)
    watch = _Watch(stopped, lambda: mean_loss(trainer, traces.held_out))
    sft = SFTTrainer(
        model=trainer.peft_model,
        args=_sft_config(trainer, directory, packing),
        train_dataset=dataset(traces.train),
        processing_class=trainer.processing_class,
        callbacks=[watch],
    )
    for callback in (PrinterCallback, ProgressCallback):
        sft.remove_callback(callback)
    sft.train(resume_from_checkpoint=_newest_checkpoint(directory))
    if sft.state.global_step < sft.state.max_steps:
        return None
    last = next(entry for entry in reversed(sft.state.log_history) if "loss" in entry)
    _check_finite(trainer, last["loss"], directory)
    held_out = {"held_out_loss_before": before, "held_out_loss": last.get("held_out_loss")}
    return {
        **_metrics(trainer.settings, traces, last, time.perf_counter() - started),
        "optimizer_steps": float(sft.state.max_steps),
        **{name: value for name, value in held_out.items() if value is not None},
    }


def mean_loss(trainer: LightningTrainer, samples: Sequence[Sample]) -> float | None:
    """Compute mean cross-entropy (nats) of the answers' tokens under the current policy; None without samples."""
    if not samples:
        return None
    scored = trainer.logprobs([sample.token_ids for sample in samples])
    values = [v for sample, row in zip(samples, scored, strict=True) for v in compress(row, sample.mask)]
    return -math.fsum(values) / len(values)


def dataset(samples: Sequence[Sample]) -> Dataset:
    """Return tokenised rows as SFTTrainer takes them. Only the answers' tokens count in the loss."""
    labels = [[t if m else IGNORED for t, m in zip(s.token_ids, s.mask, strict=True)] for s in samples]
    return Dataset.from_dict({"input_ids": [list(s.token_ids) for s in samples], "labels": labels})


@dataclass(frozen=True, slots=True)
class Packing:
    """The number of tokens in a block of whole rows, and of blocks in an optimizer step."""

    block_tokens: int
    blocks: int

    @classmethod
    def of(cls, samples: Sequence[Sample], batch_tokens: int) -> Packing:
        longest = max(len(sample.token_ids) for sample in samples)
        block = max(longest, min(BLOCK_TOKENS, batch_tokens))
        return cls(block, max(1, batch_tokens // block))


class _Watch(TrainerCallback):
    """Ends the run when it is told to, marks whole checkpoints, and logs every epoch."""

    def __init__(self, stopped: Callable[[], bool], held_out_loss: Callable[[], float | None]) -> None:
        self._stopped = stopped
        self._held_out_loss = held_out_loss

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stopped() and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / MARKER).touch()
        log.info("%d of %d optimizer steps", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" not in logs:  # TRL's summary of the run
            return
        measured = self._held_out_loss()
        held_out = "" if measured is None else f" (held out {measured:.4g})"
        if measured is not None:
            state.log_history[-1]["held_out_loss"] = measured  # goes into checkpoints with the rest
        log.info("epoch %.3g of %d: loss %.4g%s", logs["epoch"], args.num_train_epochs, logs["loss"], held_out)


def _metrics(config: TrainerConfig, traces: Traces, last: dict[str, float], seconds: float) -> dict[str, float]:
    """Metrics under the names of `metric_schema`; `last` is what TRL logged of the last epoch."""
    epochs = config.sft.epochs
    trained = epochs * sum(sample.trained_tokens for sample in traces.train)
    computed = epochs * sum(len(sample.token_ids) for sample in traces.train)
    return {
        "loss": last["loss"],
        "grad_norm": last["grad_norm"],
        "lr": config.sft.learning_rate,
        "token_accuracy": last["mean_token_accuracy"],
        "epochs": float(epochs),
        "skipped": 0.0,
        "trained_tokens": float(trained),
        "computed_tokens": float(computed),
        "trained_tokens_per_s": trained / seconds,
        "computed_tokens_per_s": computed / seconds,
        "step_s": seconds,
    }


def _check_finite(trainer: LightningTrainer, loss: float, directory: Path) -> None:
    if not (math.isfinite(loss) and all(torch.isfinite(value).all() for value in trainer.adapter().values())):
        shutil.rmtree(directory, ignore_errors=True)
        raise LightningError(
            f"supervised fine-tuning diverged (loss {loss:g}): nothing of it is kept; try a lower "
            "trainer.sft.learning_rate"
        )


def _newest_checkpoint(directory: Path) -> str | None:
    """The newest checkpoint that was written to the end."""
    whole = [path.parent for path in directory.glob(f"checkpoint-*/{MARKER}")]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def _sft_config(trainer: LightningTrainer, directory: Path, packing: Packing) -> SFTConfig:
    config, cuda = trainer.settings, torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(directory),
        use_cpu=not cuda,
        bf16=cuda and trainer.policy_model.dtype == torch.bfloat16,
        gradient_checkpointing=cuda,
        # Rows of a block do not see each other, since the model makes its mask from `position_ids`.
        packing=True,
        max_length=packing.block_tokens,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=packing.blocks,
        num_train_epochs=config.sft.epochs,
        learning_rate=config.sft.learning_rate,
        lr_scheduler_type="linear",
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        logging_strategy="epoch",
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=1 / SAVES,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )
