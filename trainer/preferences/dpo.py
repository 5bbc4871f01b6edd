"""`train --method dpo`: makes the adapter prefer the better of two siblings, with TRL's DPOTrainer.

TRL tokenises text and trains every token after the prompt. Here rows come with the tokens that were sampled, and only
these are in the loss: what tools returned is context. The reference is the weights that the run starts from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import DPOConfig, DPOTrainer

from ..step.trainer import LightningTrainer
from ..tuning.fit import Watch, arguments, fit, tuning_metrics
from ..tuning.run import TuningRun
from ..types import Method, Sample
from .pairs import Pair, PairReader, Pairs

HELD_OUT = ("held_out_accuracy", "held_out_margin")  # the metrics of `preferences`


class DpoRun(TuningRun[Pairs]):
    """One run of direct preference optimization."""

    method: ClassVar[Method] = "dpo"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reader = PairReader(self._config, self._store, self._trainer.max_tokens, self._trainer.vocabulary)

    async def _read(self, among: Collection[str] | None = None) -> Pairs:
        return await self._reader.read(among)

    def _tune(self, lessons: Pairs, directory: Path, stopped: Callable[[], bool]) -> dict[str, float] | None:
        return prefer(self._trainer, lessons, directory, stopped)


class PairTrainer(DPOTrainer):
    """A DPOTrainer over rows of token ids, each with a mask of what was sampled and a log-probability to refer to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.precompute_ref_logps = True  # they are in the rows
        self.model.delete_adapter("ref")  # TRL's copy of the weights, which would be in every checkpoint

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def prefer(
    trainer: LightningTrainer, pairs: Pairs, directory: Path, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Train `trainer`'s adapter on the pairs; returns metrics, or None if it was stopped before the end.

    Goes on from the newest checkpoint in `directory`. Raises LightningError if the loss or the weights are not finite.
    """
    started, config = time.perf_counter(), trainer.settings.dpo
    before = {f"{name}_before": value for name, value in preferences(trainer, pairs.held_out).items()}
    referred = dataset(trainer, pairs.train)
    rows = [sample for pair in pairs.train for sample in pair]
    longest = 2 * max(len(sample.token_ids) for sample in rows)
    dpo = PairTrainer(
        model=trainer.peft_model,
        args=dpo_config(trainer, directory, max(1, config.batch_tokens // longest)),
        data_collator=collate,
        train_dataset=referred,
        processing_class=trainer.processing_class,
        callbacks=[Watch(stopped, lambda: preferences(trainer, pairs.held_out))],
    )
    last = fit(trainer, dpo, directory, "trainer.dpo.learning_rate")
    if last is None:
        return None
    common = tuning_metrics(
        last,
        epochs=config.epochs,
        rate=config.learning_rate,
        trained=sum(sample.trained_tokens for sample in rows),
        computed=sum(len(sample.token_ids) for sample in rows),
        seconds=time.perf_counter() - started,
    )
    measured = {name: value for name, value in last.items() if name in HELD_OUT}
    grown = {"preference_margin": last["rewards/margins"], "preference_accuracy": last["rewards/accuracies"]}
    return {**common, **grown, **before, **measured}


def preferences(trainer: LightningTrainer, pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the share of pairs whose chosen answer is the likelier, and by how many nats on average; {} without."""
    if not pairs:
        return {}
    chosen, rejected = answer_logprobs(trainer, pairs)
    margins = [a - b for a, b in zip(chosen, rejected, strict=True)]
    return dict(zip(HELD_OUT, (fmean(margin > 0 for margin in margins), fmean(margins)), strict=True))


def answer_logprobs(trainer: LightningTrainer, pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    """Return the log-probability of the sampled tokens of each chosen and of each rejected row."""

    def of(samples: Sequence[Sample]) -> list[float]:
        scored = trainer.logprobs([sample.token_ids for sample in samples])
        return [math.fsum(compress(row, sample.mask)) for row, sample in zip(scored, samples, strict=True)]

    return of([pair.chosen for pair in pairs]), of([pair.rejected for pair in pairs])


def dataset(trainer: LightningTrainer, pairs: Sequence[Pair]) -> Dataset:
    """Return the pairs as rows for `collate`, referred to the policy's present weights."""
    chosen, rejected = answer_logprobs(trainer, pairs)
    return Dataset.from_dict({
        "chosen_ids": [list(pair.chosen.token_ids) for pair in pairs],
        "chosen_mask": [list(pair.chosen.mask) for pair in pairs],
        "rejected_ids": [list(pair.rejected.token_ids) for pair in pairs],
        "rejected_mask": [list(pair.rejected.mask) for pair in pairs],
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    })  # fmt: skip


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad B pairs to (2B, T) ids, attention mask and mask of the sampled tokens: the chosen first, as TRL wants it."""

    def padded(values: str) -> Tensor:
        sides = [torch.tensor(row[f"{side}_{values}"]) for side in ("chosen", "rejected") for row in rows]
        return pad_sequence(sides, batch_first=True)

    lengths = torch.tensor([len(row[f"{side}_ids"]) for side in ("chosen", "rejected") for row in rows])
    ids = padded("ids")
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        "completion_mask": padded("mask"),
        **{name: torch.tensor([row[name] for row in rows]) for name in ("ref_chosen_logps", "ref_rejected_logps")},
    }


def dpo_config(trainer: LightningTrainer, directory: Path, pairs: int) -> DPOConfig:
    """Return TRL's settings of a run whose optimizer steps have so many pairs."""
    config = trainer.settings.dpo
    return DPOConfig(
        **arguments(trainer, directory, epochs=config.epochs, rate=config.learning_rate, passes=pairs),
        beta=config.beta,
        max_length=None,
        remove_unused_columns=False,
    )
