"""`train --method dpo`: makes the adapter prefer the better of two siblings, with TRL's DPOTrainer.

TRL tokenises text and trains every token after the prompt. Here rows come with the tokens that were sampled, and only
these are in the loss: what tools returned is context. The reference is the weights that the run starts from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer

from ...store.store import Store
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Sift
from .config import TuneConfig
from .fit import FitCallback, Recipe, arguments
from .pairs import Pair, PairReader, Pairs
from .rows import GivenRows, answer_logprobs, given, measured, padded

PASS_TOKENS = 1024  # of the pairs that are computed together


class PairTrainer(GivenRows, DPOTrainer):
    """A DPOTrainer over rows of token ids, each with a mask of what was sampled and a log-probability to refer to."""


async def _read(store: Store, trainer: LightningTrainer, sift: Sift | None, among: Collection[str] | None) -> Pairs:
    return await PairReader(trainer.settings, store, trainer.max_tokens, trainer.vocabulary, sift).read(among)


def _tuner(
    trainer: LightningTrainer, pairs: Sequence[Pair], directory: Path, watch: FitCallback
) -> tuple[PairTrainer, int]:
    lengths = [len(sample.token_ids) for pair in pairs for sample in pair]
    referred, longest = dataset(trainer, pairs), 2 * max(lengths)
    in_a_step = max(1, trainer.settings.section(TuneConfig).dpo.batch_tokens // longest)
    dpo = PairTrainer(
        model=trainer.model,
        args=dpo_config(trainer, directory, in_a_step, PASS_TOKENS // longest),
        data_collator=collate,
        train_dataset=referred,
        processing_class=trainer.processing_class,
        callbacks=[watch],
    )
    return dpo, sum(lengths)


def _measured(trainer: LightningTrainer, pairs: Sequence[Pair]) -> dict[str, float]:
    return measured(margins(trainer, pairs))


def _learned(last: Mapping[str, float]) -> dict[str, float]:
    return {"preference_margin": last["rewards/margins"], "preference_accuracy": last["rewards/accuracies"]}


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
    in_a_pass = max(1, min(together, pairs))
    passes = max(1, pairs // in_a_pass)
    return DPOConfig(
        **arguments(trainer, "dpo", directory, passes=passes, together=in_a_pass),
        **given(trainer),
        beta=trainer.settings.section(TuneConfig).dpo.beta,
    )


DPO = Recipe("dpo", _read, _tuner, _measured, _learned)
