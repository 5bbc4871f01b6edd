"""`train --method sft`: fine-tunes the adapter on the best rollouts of the store, with TRL's SFTTrainer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from ...store.store import Store
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Sample, Sift
from .config import TuneConfig
from .fit import FitCallback, Recipe, arguments
from .traces import TraceReader, Traces

IGNORED = -100  # the label of a token that is not in the loss
# Rows are packed into blocks of so many tokens, or as long as the longest row. Attention costs a block's square.
BLOCK_TOKENS = 1024


async def _read(store: Store, trainer: LightningTrainer, sift: Sift | None, among: Collection[str] | None) -> Traces:
    return await TraceReader(
        trainer.settings, store, trainer.processing_class, trainer.max_tokens, trainer.vocabulary, sift
    ).read(among)


def _tuner(
    trainer: LightningTrainer, traces: Sequence[Sample], directory: Path, watch: FitCallback
) -> tuple[SFTTrainer, int]:
    packing = Packing.of(traces, trainer.settings.section(TuneConfig).sft.batch_tokens)
    sft = SFTTrainer(
        model=trainer.model,
        args=_sft_config(trainer, directory, packing),
        train_dataset=dataset(traces),
        processing_class=trainer.processing_class,
        callbacks=[watch],
    )
    return sft, sum(len(sample.token_ids) for sample in traces)


def _measured(trainer: LightningTrainer, traces: Sequence[Sample]) -> dict[str, float]:
    loss = mean_loss(trainer, traces)
    return {} if loss is None else {"loss": loss}


def _learned(last: Mapping[str, float]) -> dict[str, float]:
    return {"token_accuracy": last["mean_token_accuracy"]}


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
    """The number of tokens in a block of complete rows, and of blocks in an optimizer step."""

    block_tokens: int
    blocks: int

    @classmethod
    def of(cls, samples: Sequence[Sample], batch_tokens: int) -> Packing:
        longest = max(len(sample.token_ids) for sample in samples)
        block = max(longest, min(BLOCK_TOKENS, batch_tokens))
        return cls(block, max(1, batch_tokens // block))


def _sft_config(trainer: LightningTrainer, directory: Path, packing: Packing) -> SFTConfig:
    return SFTConfig(
        **arguments(trainer, "sft", directory, passes=packing.blocks),
        # Rows of a block do not see each other, since the model makes its mask from `position_ids`.
        packing=True,
        max_length=packing.block_tokens,
    )


SFT = Recipe("sft", _read, _tuner, _measured, _learned)
