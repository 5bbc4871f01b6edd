"""Fine-tunes the weights on lessons from the store's rollouts, and commits the result as one step.

A run claims no rollouts. The step is published, except offline. Until the commit, the run's own checkpoints are in
`policy.directory`/METHOD/N, where N is the step that it starts from.

The trainers are TRL's: supervised (sft), pairs (DPO, https://arxiv.org/abs/2305.18290), thumbs up and down (KTO,
https://arxiv.org/abs/2402.01306). Only answers' tokens are in the loss; what tools returned is context. The reference
model has the weights that the run starts from.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

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
from .lessons import Example, LessonReader, Lessons, prompt_of

log = logging.getLogger(__name__)
NOTE = "run.json"
# TRL's, of every method.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 1, "lr_scheduler_type": "linear", "logging_steps": 1,
    "logging_nan_inf_filter": False, "save_strategy": "steps", "save_steps": 0.1, "save_total_limit": 2,
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
IGNORED = -100  # the label of a token that is not in the loss
BATCH_TOKENS = {"sft": 512, "dpo": 8192, "kto": 1024}  # of an optimizer step, prompts included
PASS_TOKENS = 1024  # of pairs that are computed together
Row = tuple[Sequence[int], Sequence[int]]  # token ids, and a mask of those that were sampled


class TuningRun:
    """One run of a method. If it is killed or stopped, the next one resumes from its checkpoint."""

    def __init__(
        self, method: str, core: TrainerCore, publisher: Publisher | None, hooks: TrainerHooks = NO_HOOKS
    ) -> None:
        config, trainer = core.config, core.engine
        assert isinstance(trainer, LightningTrainer)
        if config.policy.adapters:
            raise ConfigError(f"--method {method} trains one adapter for all agents: remove policy.adapters")
        if config.trainer.has_guide:
            log.warning("the teacher is only used in RL: --method %s ignores it", method)
        self._method, self._config, self._sift = method, config.trainer, hooks.sift
        self._store, self._trainer, self._publisher = core.store, trainer, publisher
        self._loop = TrainingLoop(core, publisher, hooks)
        self._runs = config.policy.directory.absolute() / method

    async def run(self, stop: asyncio.Event) -> Step | None:
        """Fine-tune, commit and publish one step. Return the store's last step, or None. Raises NothingToLearn."""
        while True:
            try:
                return await self._run(stop)
            except Stopped:
                log.warning("stopped: run the same command again to continue")
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
                raise LightningError(f"publishing has stopped: {why}")
            await self._loop.follow_live_version()
            await self._loop.verify_live()
        last = await self._store.steps.last()
        directory = self._runs / str(last.step if last else 0)
        earlier = [path for path in self._runs.glob("*") if path != directory]
        for path in earlier:
            shutil.rmtree(path, ignore_errors=True)
        if earlier and last is not None and last.metrics.get("method") == self._method:
            log.info("finished the run that was stopped while step %d was being published", last.step)
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
            log.warning("stopped: run the same command again to resume from the checkpoint in %s", directory)
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
                with suppress(LightningError):
                    lessons = await reader.read(set(note["rollouts"]))
                    if lessons.digest == note["digest"]:
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


class Rows(NamedTuple):
    """Rows in the form that a TRL trainer takes, its settings for them, and the number of tokens per epoch."""

    dataset: Dataset
    settings: dict[str, Any]
    computed: int


class GivenRows:
    """Lets a TRL trainer take rows of token ids, with masks and reference scores. Use it as the first base class."""

    model: Any
    precompute_ref_logps: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.precompute_ref_logps = True  # they are in the rows
        if isinstance(self.model, PeftModel):
            self.model.delete_adapter("ref")  # TRL's copy of the weights, which would be in every checkpoint

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


class PairTrainer(GivenRows, DPOTrainer):
    """A DPOTrainer over rows of token ids."""


class ThumbTrainer(GivenRows, KTOTrainer):
    """A KTOTrainer over rows of token ids."""


def _packed(_: LightningTrainer, lessons: Sequence[Example]) -> Rows:
    """Rows with labels for answers only, to be packed into blocks. Rows in a block do not see each other."""
    samples = [one.rows[0] for one in lessons]
    lengths = [len(sample.token_ids) for sample in samples]
    labels = [[t if m else IGNORED for t, m in zip(s.token_ids, s.mask, strict=True)] for s in samples]
    dataset = Dataset.from_dict({"input_ids": [list(s.token_ids) for s in samples], "labels": labels})
    return Rows(dataset, {"packing": True, "max_length": max(*lengths, BATCH_TOKENS["sft"])}, sum(lengths))


def _paired(trainer: LightningTrainer, lessons: Sequence[Example]) -> Rows:
    chosen, rejected = ([(one.rows[i].token_ids, one.rows[i].mask) for one in lessons] for i in (0, 1))
    longest = 2 * max(len(ids) for ids, _ in (*chosen, *rejected))
    pairs = max(1, BATCH_TOKENS["dpo"] // longest)
    together = max(1, min(PASS_TOKENS // longest, pairs))
    settings = {
        "per_device_train_batch_size": together,
        "gradient_accumulation_steps": max(1, pairs // together),
        "beta": trainer.settings.section(TuneConfig).dpo.beta,
    }
    return referred(trainer, chosen, rejected, settings)


def _lent(trainer: LightningTrainer, lessons: Sequence[Example]) -> Rows:
    """Rows for KTO, each with a second one over which KTO averages KL: its prompt with the previous row's answer."""
    config, most = trainer.settings.section(TuneConfig).kto, trainer.max_tokens
    samples = [one.rows[0] for one in lessons]
    lent: list[Row] = []
    for number, sample in enumerate(samples):
        prompt, other = prompt_of(sample), samples[number - 1]
        start = len(prompt_of(other))
        ids, mask = (*prompt, *other.token_ids[start:]), (*(0 for _ in prompt), *other.mask[start:])
        lent.append((ids[:most], mask[:most]))
    own = [(sample.token_ids, sample.mask) for sample in samples]
    settings = {
        "per_device_train_batch_size": max(2, BATCH_TOKENS["kto"] // max(len(ids) for ids, _ in (*own, *lent))),
        "beta": config.beta,
        "desirable_weight": config.up_weight,
        "undesirable_weight": config.down_weight,
    }
    return referred(trainer, own, lent, settings, label=[one.up for one in lessons])


def referred(
    trainer: LightningTrainer,
    rows: Sequence[Row],
    others: Sequence[Row],
    settings: dict[str, Any],
    **columns: Sequence[Any],
) -> Rows:
    """Return pairs of rows, with the log-probabilities of their answers under the current weights."""
    scores, count = answer_logprobs(trainer, [*rows, *others]), len(rows)
    dataset = Dataset.from_dict({
        "ids": [list(ids) for ids, _ in rows],
        "mask": [list(mask) for _, mask in rows],
        "other_ids": [list(ids) for ids, _ in others],
        "other_mask": [list(mask) for _, mask in others],
        "ref": scores[:count],
        "other_ref": scores[count:],
        **columns,
    })  # fmt: skip
    settings = settings | {
        "max_length": None,
        "remove_unused_columns": False,
        # Without adapters TRL would load a second model to refer to.
        "precompute_ref_log_probs": trainer.settings.weights == "full",
    }
    return Rows(dataset, settings, sum(len(ids) for ids, _ in (*rows, *others)))


def _collate_pairs(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad B pairs to (2B, T), chosen rows first, as TRL expects."""
    ids, mask = ([row[f"{side}{what}"] for side in ("", "other_") for row in rows] for what in ("ids", "mask"))
    references = {"ref_chosen_logps": "ref", "ref_rejected_logps": "other_ref"}
    return padded(ids, mask) | {name: torch.tensor([row[ours] for row in rows]) for name, ours in references.items()}


def _collate_thumbs(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad B rows to (B, T). The same prompts with other answers have names that begin with `KL_`."""
    own = padded([row["ids"] for row in rows], [row["mask"] for row in rows])
    lent = padded([row["other_ids"] for row in rows], [row["other_mask"] for row in rows])
    values = {"ref_logps": "ref", "ref_KL_logps": "other_ref", "label": "label"}
    return {
        **own,
        **{f"KL_{name}": tensor for name, tensor in lent.items()},
        **{name: torch.tensor([row[ours] for row in rows]) for name, ours in values.items()},
    }


def padded(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Pad B rows to (B, T): ids, attention mask and mask of sampled tokens, under TRL's names."""
    lengths = torch.tensor([len(row) for row in ids])
    tokens = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (torch.arange(tokens.shape[1]) < lengths[:, None]).long(),
        "completion_mask": pad_sequence([torch.tensor(mask) for mask in masks], batch_first=True),
    }


def answer_logprobs(trainer: LightningTrainer, rows: Sequence[Row]) -> list[float]:
    """Return the summed log-probability of each row's sampled tokens under the current weights."""
    scored = trainer.logprobs([ids for ids, _ in rows])
    return [math.fsum(compress(scores, mask)) for scores, (_, mask) in zip(scored, rows, strict=True)]


def measured(method: str, trainer: LightningTrainer, lessons: Sequence[Example]) -> dict[str, float]:
    """Return the metrics of held-out lessons under the current weights; {} if there is nothing to compare.

    sft: the mean cross-entropy (nats) of the answers' tokens. Otherwise the share of comparisons in which the better
    answer is likelier, and by how many nats on average: dpo compares each pair, kto every thumbs-up answer with every
    thumbs-down answer.
    """
    rows = [row for one in lessons for row in one.rows]
    scores = answer_logprobs(trainer, [(row.token_ids, row.mask) for row in rows])
    if method == "sft":
        return {"loss": -math.fsum(scores) / sum(row.trained_tokens for row in rows)} if rows else {}
    if method == "dpo":
        margins = [better - worse for better, worse in zip(scores[::2], scores[1::2], strict=True)]
    else:
        liked = [one.up for one in lessons]
        margins = [a - b for a in compress(scores, liked) for b in compress(scores, (not up for up in liked))]
    return {"accuracy": fmean(m > 0 for m in margins), "margin": fmean(margins)} if margins else {}


class Method(NamedTuple):
    """TRL's trainer and settings, how lessons become rows and batches, and our names for what it logs."""

    trainer: type[Trainer]
    settings: Callable[..., Any]
    rows: Callable[[LightningTrainer, Sequence[Example]], Rows]
    collate: Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]] | None
    logged: Mapping[str, str]


METHODS = {
    "sft": Method(SFTTrainer, SFTConfig, _packed, None, {"token_accuracy": "mean_token_accuracy"}),
    "dpo": Method(
        PairTrainer, DPOConfig, _paired, _collate_pairs,
        {"preference_margin": "rewards/margins", "preference_accuracy": "rewards/accuracies"},
    ),
    "kto": Method(ThumbTrainer, KTOConfig, _lent, _collate_thumbs, {}),
}  # fmt: skip


class FitCallback(TrainerCallback):
    """Ends the run on request, logs progress, times each step, and marks complete checkpoints with an empty file."""

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
    """Train, from the last checkpoint if any. Return metrics; None if stopped. Raises LightningError on divergence."""
    how, section = METHODS[method], getattr(trainer.settings.section(TuneConfig), method)
    before = measured(method, trainer, lessons.held_out)
    rows, config, cuda = how.rows(trainer, lessons.train), trainer.settings, torch.cuda.is_available()
    settings: dict[str, Any] = SETTINGS | {
        "output_dir": str(directory), "use_cpu": not cuda, "gradient_checkpointing": cuda, "seed": config.seed,
        "bf16": uses_autocast(config), "max_grad_norm": config.max_grad_norm,
        "num_train_epochs": section.epochs, "learning_rate": section.learning_rate,
    }  # fmt: skip
    tuner = how.trainer(
        model=trainer.model, args=how.settings(**settings | rows.settings), data_collator=how.collate,
        train_dataset=rows.dataset, processing_class=trainer.tokenizer, callbacks=[FitCallback(stopped)],
    )  # fmt: skip
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
            f"fine-tuning diverged (loss {means['loss']:g}): its weights are discarded; try a lower "
            f"tune.{method}.learning_rate"
        )
    trained = section.epochs * sum(row.trained_tokens for one in lessons.train for row in one.rows)
    computed = section.epochs * rows.computed
    return {
        **means, "grad_norm": last["grad_norm"], "lr": section.learning_rate, "epochs": float(section.epochs),
        "optimizer_steps": float(tuner.state.max_steps), "skipped": 0.0, "step_s": seconds,
        "trained_tokens": float(trained), "trained_tokens_per_s": trained / seconds,
        "computed_tokens": float(computed), "computed_tokens_per_s": computed / seconds,
        **{f"held_out_{name}_before": value for name, value in before.items()},
        **{f"held_out_{name}": value for name, value in measured(method, trainer, lessons.held_out).items()},
    }  # fmt: skip


def last_epoch(history: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    logs = [entry for entry in history if "loss" in entry]
    return [entry for entry in logs if math.ceil(entry["epoch"]) == math.ceil(logs[-1]["epoch"])]
