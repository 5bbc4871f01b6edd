"""Scores and pads rows of sampled tokens for methods of preference, and measures on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Sample


class GivenRows:
    """Lets a preference trainer of TRL's take rows of token ids, each with a mask and log-probabilities to refer to.

    TRL would tokenise texts, and compute the reference by itself. Use it as the first base.
    """

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


def given(trainer: LightningTrainer) -> dict[str, Any]:
    """Return TRL's settings for rows that come with their tokens."""
    return {
        "max_length": None,
        "remove_unused_columns": False,
        # Without adapters TRL would load a second model to refer to.
        "precompute_ref_log_probs": trainer.settings.weights == "full",
    }


def answer_logprobs(trainer: LightningTrainer, samples: Sequence[Sample]) -> list[float]:
    """Return the log-probability of the sampled tokens of each row under the policy's present weights."""
    scored = trainer.logprobs([sample.token_ids for sample in samples])
    return [math.fsum(compress(row, sample.mask)) for row, sample in zip(scored, samples, strict=True)]


def measured(margins: Sequence[float]) -> dict[str, float]:
    """Return the share of comparisons in which the better answer is the likelier, and the mean margin; {} without."""
    return {"accuracy": fmean(m > 0 for m in margins), "margin": fmean(margins)} if margins else {}


def padded(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], prefix: str = "") -> dict[str, Tensor]:
    """Pad B rows to (B, T) ids, attention mask and mask of the sampled tokens, by the names that TRL wants."""
    lengths = torch.tensor([len(row) for row in ids])
    tokens = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    return {
        f"{prefix}input_ids": tokens,
        f"{prefix}attention_mask": (torch.arange(tokens.shape[1]) < lengths[:, None]).long(),
        f"{prefix}completion_mask": pad_sequence([torch.tensor(mask) for mask in masks], batch_first=True),
    }
