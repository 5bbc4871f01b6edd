"""`train --method sft`: fine-tunes the adapter on the best rollouts of the store, with TRL's SFTTrainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from ..step.trainer import LightningTrainer
from ..tuning.fit import FitCallback, arguments, fit, tuning_metrics
from ..tuning.run import TuningRun
from ..types import Sample
from .traces import TraceReader, Traces

IGNORED = -100  # the label of a token that is not in the loss
# Rows are packed into blocks of so many tokens, or as long as the longest row. Attention costs a block's square.
BLOCK_TOKENS = 1024


class SftRun(TuningRun[Traces]):
    """One run of supervised fine-tuning."""

    method: ClassVar[str] = "sft"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        trainer = self._trainer
        self._reader = TraceReader(
            self._config, self._store, trainer.processing_class, trainer.max_tokens, trainer.vocabulary
        )

    async def _read(self, among: Collection[str] | None = None) -> Traces:
        return await self._reader.read(among)

    def _tune(self, lessons: Traces, directory: Path, stopped: Callable[[], bool]) -> dict[str, float] | None:
        return fine_tune(self._trainer, lessons, directory, stopped)


def fine_tune(
    trainer: LightningTrainer, traces: Traces, directory: Path, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Train `trainer`'s adapter on the traces; returns metrics, or None if it was stopped before the end.

    Goes on from the newest checkpoint in `directory`. Raises LightningError if the loss or the weights are not finite.
    """

    def held_out() -> dict[str, float]:
        loss = mean_loss(trainer, traces.held_out)
        return {} if loss is None else {"held_out_loss": loss}

    config = trainer.settings.sft
    before = {f"{name}_before": value for name, value in held_out().items()}
    packing = Packing.of(traces.train, config.batch_tokens)
    sft = SFTTrainer(
        model=trainer.model,
        args=_sft_config(trainer, directory, packing),
        train_dataset=dataset(traces.train),
        processing_class=trainer.processing_class,
        callbacks=[FitCallback(stopped, held_out)],
    )
    last = fit(trainer, sft, directory, "trainer.sft.learning_rate")
    if last is None:
        return None
    common = tuning_metrics(
        last,
        epochs=config.epochs,
        rate=config.learning_rate,
        trained=sum(sample.trained_tokens for sample in traces.train),
        computed=sum(len(sample.token_ids) for sample in traces.train),
    )
    measured = {name: last[name] for name in ("held_out_loss",) if name in last}
    return {**common, "token_accuracy": last["mean_token_accuracy"], **before, **measured}


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


def _sft_config(trainer: LightningTrainer, directory: Path, packing: Packing) -> SFTConfig:
    config = trainer.settings.sft
    return SFTConfig(
        **arguments(trainer, directory, epochs=config.epochs, rate=config.learning_rate, passes=packing.blocks),
        # Rows of a block do not see each other, since the model makes its mask from `position_ids`.
        packing=True,
        max_length=packing.block_tokens,
    )
