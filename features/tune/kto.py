"""`train --method kto`: raises answers with thumbs up and lowers those with thumbs down, with TRL's KTOTrainer.

As in DPO (dpo.py), only the tokens that were sampled are in the loss, and the reference is the weights that the run
starts from. KTO's KL is measured on each row's prompt with the answer of the row before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import KTOConfig, KTOTrainer

from ...store.store import Store
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Sample, Sift
from .config import TuneConfig
from .fit import FitCallback, Recipe, arguments
from .rows import GivenRows, answer_logprobs, given, measured, padded
from .thumbs import Thumb, ThumbReader, Thumbs


class ThumbTrainer(GivenRows, KTOTrainer):
    """A KTOTrainer over rows of token ids, each with a mask of what was sampled and log-probabilities to refer to."""


async def _read(store: Store, trainer: LightningTrainer, sift: Sift | None, among: Collection[str] | None) -> Thumbs:
    return await ThumbReader(trainer.settings, store, trainer.max_tokens, trainer.vocabulary, sift).read(among)


def _tuner(
    trainer: LightningTrainer, thumbs: Sequence[Thumb], directory: Path, watch: FitCallback
) -> tuple[ThumbTrainer, int]:
    rows = dataset(trainer, thumbs)
    longest = max(len(row[ids]) for row in rows for ids in ("ids", "KL_ids"))
    kto = ThumbTrainer(
        model=trainer.model,
        args=kto_config(trainer, directory, max(2, trainer.settings.section(TuneConfig).kto.batch_tokens // longest)),
        data_collator=collate,
        train_dataset=rows,
        processing_class=trainer.processing_class,
        callbacks=[watch],
    )
    return kto, sum(len(row["ids"]) + len(row["KL_ids"]) for row in rows)


def _measured(trainer: LightningTrainer, thumbs: Sequence[Thumb]) -> dict[str, float]:
    return measured(margins(trainer, thumbs))


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
    config = trainer.settings.section(TuneConfig).kto
    return KTOConfig(
        **arguments(trainer, "kto", directory, together=rows),
        **given(trainer),
        beta=config.beta,
        desirable_weight=config.up_weight,
        undesirable_weight=config.down_weight,
    )


def _mismatched(row: Sample, other: Sample, most: int) -> tuple[list[int], list[int]]:
    """The prompt of `row` with the answer of `other`, at most so many tokens, and their mask."""
    prompt, start = row.token_ids[: row.mask.index(1)], other.mask.index(1)
    mask = [0] * len(prompt) + list(other.mask[start:])
    return [*prompt, *other.token_ids[start:]][:most], mask[:most]


KTO = Recipe("kto", _read, _tuner, _measured)
