"""`train --method kto`: raises answers with thumbs up and lowers those with thumbs down, with TRL's KTOTrainer.

As in DPO (dpo.py), only the tokens that were sampled are in the loss, and the reference is the weights that the run
starts from. KTO's KL is measured on each row's prompt with the answer of the row before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor
from trl import KTOConfig, KTOTrainer

from ..step.trainer import LightningTrainer
from ..tuning.fit import FitCallback, arguments, fit, tuning_metrics
from ..tuning.run import TuningRun
from ..types import Sample
from .rows import HELD_OUT, GivenRows, answer_logprobs, measured, padded
from .thumbs import Thumb, ThumbReader, Thumbs


class KtoRun(TuningRun[Thumbs]):
    """One run of Kahneman-Tversky optimization."""

    method: ClassVar[str] = "kto"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reader = ThumbReader(self._config, self._store, self._trainer.max_tokens, self._trainer.vocabulary)

    async def _read(self, among: Collection[str] | None = None) -> Thumbs:
        return await self._reader.read(among)

    def _tune(self, lessons: Thumbs, directory: Path, stopped: Callable[[], bool]) -> dict[str, float] | None:
        return heed(self._trainer, lessons, directory, stopped)


class ThumbTrainer(GivenRows, KTOTrainer):
    """A KTOTrainer over rows of token ids, each with a mask of what was sampled and log-probabilities to refer to."""


def heed(
    trainer: LightningTrainer, thumbs: Thumbs, directory: Path, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Train `trainer`'s adapter on rows with thumbs; returns metrics, or None if it was stopped before the end.

    Goes on from the newest checkpoint in `directory`. Raises LightningError if the loss or the weights are not finite.
    """

    def held_out() -> dict[str, float]:
        return measured(margins(trainer, thumbs.held_out))

    config = trainer.settings.kto
    before = {f"{name}_before": value for name, value in held_out().items()}
    rows = dataset(trainer, thumbs.train)
    longest = max(len(row["KL_ids"]) for row in rows)
    longest = max(longest, *(len(sample.token_ids) for sample in thumbs.samples))
    kto = ThumbTrainer(
        model=trainer.model,
        args=kto_config(trainer, directory, max(2, config.batch_tokens // longest)),
        data_collator=collate,
        train_dataset=rows,
        processing_class=trainer.processing_class,
        callbacks=[FitCallback(stopped, held_out)],
    )
    last = fit(trainer, kto, directory, "trainer.kto.learning_rate")
    if last is None:
        return None
    common = tuning_metrics(
        last,
        epochs=config.epochs,
        rate=config.learning_rate,
        trained=sum(sample.trained_tokens for sample in thumbs.samples),
        computed=sum(len(row["ids"]) + len(row["KL_ids"]) for row in rows),
    )
    return {**common, **before, **{name: value for name, value in last.items() if name in HELD_OUT}}


def margins(trainer: LightningTrainer, thumbs: Sequence[Thumb]) -> list[float]:
    """Return by how many nats each answer with thumbs up is likelier than each with thumbs down."""
    scores = answer_logprobs(trainer, [thumb.sample for thumb in thumbs])
    up, down = ([s for s, thumb in zip(scores, thumbs, strict=True) if thumb.up is good] for good in (True, False))
    return [a - b for a in up for b in down]


def dataset(trainer: LightningTrainer, thumbs: Sequence[Thumb]) -> Dataset:
    """Return rows for `collate`, referred to the present weights; the first is lent the last one's answer."""
    samples = [thumb.sample for thumb in thumbs]
    lent = [_mismatched(row, samples[n - 1], trainer.max_tokens) for n, row in enumerate(samples)]
    scored = trainer.logprobs([ids for ids, _ in lent])
    return Dataset.from_dict({
        "ids": [list(sample.token_ids) for sample in samples],
        "mask": [list(sample.mask) for sample in samples],
        "KL_ids": [ids for ids, _ in lent],
        "KL_mask": [mask for _, mask in lent],
        "ref_logps": answer_logprobs(trainer, samples),
        "ref_KL_logps": [math.fsum(compress(row, mask)) for row, (_, mask) in zip(scored, lent, strict=True)],
        "label": [thumb.up for thumb in thumbs],
    })  # fmt: skip


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad B rows, and with KL_ the same prompts with other answers, each to (B, T)."""
    return {
        **padded([row["ids"] for row in rows], [row["mask"] for row in rows]),
        **padded([row["KL_ids"] for row in rows], [row["KL_mask"] for row in rows], "KL_"),
        **{name: torch.tensor([row[name] for row in rows]) for name in ("ref_logps", "ref_KL_logps", "label")},
    }


def kto_config(trainer: LightningTrainer, directory: Path, rows: int) -> KTOConfig:
    """Return TRL's settings of a run whose optimizer steps have so many rows, in one pass: KTO's KL is their mean."""
    config = trainer.settings.kto
    common = arguments(trainer, directory, epochs=config.epochs, rate=config.learning_rate, passes=1)
    return KTOConfig(
        **{**common, "per_device_train_batch_size": rows},
        beta=config.beta,
        desirable_weight=config.up_weight,
        undesirable_weight=config.down_weight,
        max_length=None,
        remove_unused_columns=False,
        # Without adapters TRL would load a second model to refer to.
        precompute_ref_log_probs=trainer.settings.weights == "full",
    )


def _mismatched(row: Sample, other: Sample, most: int) -> tuple[list[int], list[int]]:
    """The prompt of `row` with the answer of `other`, at most so many tokens, and their mask."""
    prompt, start = row.token_ids[: row.mask.index(1)], other.mask.index(1)
    mask = [0] * len(prompt) + list(other.mask[start:])
    return [*prompt, *other.token_ids[start:]][:most], mask[:most]
