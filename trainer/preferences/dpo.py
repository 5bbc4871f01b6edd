"""`train --method dpo`: makes the adapter prefer the better of two siblings, with TRL's DPOTrainer.

TRL tokenises text and trains every token after the prompt. Here rows come with the tokens that were sampled, and only
these are in the loss: what tools returned is context. The reference is the weights that the run starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer

from ..step.trainer import LightningTrainer
from ..tuning.fit import FitCallback, arguments, fit, tuning_metrics
from ..tuning.run import TuningRun
from .pairs import Pair, PairReader, Pairs
from .rows import HELD_OUT, GivenRows, answer_logprobs, measured, padded

PASS_TOKENS = 1024  # of the pairs that are computed together


class DpoRun(TuningRun[Pairs]):
    """One run of direct preference optimization."""

    method: ClassVar[str] = "dpo"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reader = PairReader(self._config, self._store, self._trainer.max_tokens, self._trainer.vocabulary)

    async def _read(self, among: Collection[str] | None = None) -> Pairs:
        return await self._reader.read(among)

    def _tune(self, lessons: Pairs, directory: Path, stopped: Callable[[], bool]) -> dict[str, float] | None:
        return prefer(self._trainer, lessons, directory, stopped)


class PairTrainer(GivenRows, DPOTrainer):
    """A DPOTrainer over rows of token ids, each with a mask of what was sampled and a log-probability to refer to."""


def prefer(
    trainer: LightningTrainer, pairs: Pairs, directory: Path, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Train `trainer`'s adapter on the pairs; returns metrics, or None if it was stopped before the end.

    Goes on from the newest checkpoint in `directory`. Raises LightningError if the loss or the weights are not finite.
    """

    def held_out() -> dict[str, float]:
        return measured(margins(trainer, pairs.held_out))

    config = trainer.settings.dpo
    before = {f"{name}_before": value for name, value in held_out().items()}
    referred = dataset(trainer, pairs.train)
    rows = [sample for pair in pairs.train for sample in pair]
    longest = 2 * max(len(sample.token_ids) for sample in rows)
    dpo = PairTrainer(
        model=trainer.model,
        args=dpo_config(trainer, directory, max(1, config.batch_tokens // longest), PASS_TOKENS // longest),
        data_collator=collate,
        train_dataset=referred,
        processing_class=trainer.processing_class,
        callbacks=[FitCallback(stopped, held_out)],
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
    )
    after = {name: value for name, value in last.items() if name in HELD_OUT}
    grown = {"preference_margin": last["rewards/margins"], "preference_accuracy": last["rewards/accuracies"]}
    return {**common, **grown, **before, **after}


def margins(trainer: LightningTrainer, pairs: Sequence[Pair]) -> list[float]:
    """Return by how many nats the chosen answer of each pair is likelier than the rejected one."""
    scores = answer_logprobs(trainer, [sample for pair in pairs for sample in pair])
    return [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]


def dataset(trainer: LightningTrainer, pairs: Sequence[Pair]) -> Dataset:
    """Return the pairs as rows for `collate`, referred to the policy's present weights."""
    scores = answer_logprobs(trainer, [sample for pair in pairs for sample in pair])
    return Dataset.from_dict({
        "chosen_ids": [list(pair.chosen.token_ids) for pair in pairs],
        "chosen_mask": [list(pair.chosen.mask) for pair in pairs],
        "rejected_ids": [list(pair.rejected.token_ids) for pair in pairs],
        "rejected_mask": [list(pair.rejected.mask) for pair in pairs],
        "ref_chosen_logps": scores[::2],
        "ref_rejected_logps": scores[1::2],
    })  # fmt: skip


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad B pairs to (2B, T), the chosen first, as TRL wants it."""
    ids, masks = ([row[f"{side}_{of}"] for side in ("chosen", "rejected") for row in rows] for of in ("ids", "mask"))
    references = {
        name: torch.tensor([row[name] for row in rows]) for name in ("ref_chosen_logps", "ref_rejected_logps")
    }
    return padded(ids, masks) | references


def dpo_config(trainer: LightningTrainer, directory: Path, pairs: int, together: int = 1) -> DPOConfig:
    """Return TRL's settings of a run of at most `pairs` in an optimizer step, `together` of them in a forward pass."""
    config = trainer.settings.dpo
    in_a_pass = max(1, min(together, pairs))
    passes = max(1, pairs // in_a_pass)
    common = arguments(trainer, directory, epochs=config.epochs, rate=config.learning_rate, passes=passes)
    return DPOConfig(
        **{**common, "per_device_train_batch_size": in_a_pass},
        beta=config.beta,
        max_length=None,
        remove_unused_columns=False,
        # Without adapters TRL would load a second model to refer to.
        precompute_ref_log_probs=trainer.settings.weights == "full",
    )
