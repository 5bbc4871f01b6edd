"""How TRL's own trainers learn from lessons: supervised (sft), from pairs (dpo), from thumbs up and down (kto).

DPO (https://arxiv.org/abs/2305.18290) makes the adapter prefer the better of two siblings. KTO
(https://arxiv.org/abs/2402.01306) raises answers with thumbs up and lowers the others; its KL is measured on each row's
prompt with the answer of the row before it.

TRL tokenises text and trains every token after the prompt. Here rows come with the tokens that were sampled, and only
these are in the loss: what tools returned is context. The reference is the weights that the run starts from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from statistics import fmean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from ...trainer.step.trainer import LightningTrainer
from .config import TuneConfig
from .lessons import Example, prompt_of

IGNORED = -100  # the label of a token that is not in the loss
BATCH_TOKENS = {"sft": 512, "dpo": 8192, "kto": 1024}  # of an optimizer step, prompts included
PASS_TOKENS = 1024  # of pairs that are computed together
Row = tuple[Sequence[int], Sequence[int]]  # token ids, and a mask of those that were sampled


class Rows(NamedTuple):
    """Rows as a trainer of TRL's takes them, its settings for them, and how many tokens it computes in an epoch."""

    dataset: Dataset
    settings: dict[str, Any]
    computed: int


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


class PairTrainer(GivenRows, DPOTrainer):
    """A DPOTrainer over rows of token ids."""


class ThumbTrainer(GivenRows, KTOTrainer):
    """A KTOTrainer over rows of token ids."""


def _packed(_: LightningTrainer, lessons: Sequence[Example]) -> Rows:
    """Rows with labels for their answers alone, to be packed into blocks. In a block they do not see each other."""
    samples = [one.rows[0] for one in lessons]
    lengths = [len(sample.token_ids) for sample in samples]
    labels = [[t if m else IGNORED for t, m in zip(s.token_ids, s.mask, strict=True)] for s in samples]
    dataset = Dataset.from_dict({"input_ids": [list(s.token_ids) for s in samples], "labels": labels})
    return Rows(dataset, {"packing": True, "max_length": max(*lengths, BATCH_TOKENS["sft"])}, sum(lengths))


def _paired(trainer: LightningTrainer, lessons: Sequence[Example]) -> Rows:
    """Chosen rows, each with its rejected one."""
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
    """Rows, each with its own prompt before the answer of the row before; the first is lent the last one's.

    An optimizer step is one pass: KTO's KL is its mean.
    """
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
    """Return rows, each with another, and with the log-probabilities of their answers under the present weights."""
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
    """Pad B pairs to (2B, T), the chosen first, as TRL wants it."""
    ids, mask = ([row[f"{side}{what}"] for side in ("", "other_") for row in rows] for what in ("ids", "mask"))
    references = {"ref_chosen_logps": "ref", "ref_rejected_logps": "other_ref"}
    return padded(ids, mask) | {name: torch.tensor([row[ours] for row in rows]) for name, ours in references.items()}


def _collate_thumbs(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad B rows, and with KL_ the same prompts with other answers, each to (B, T)."""
    own = padded([row["ids"] for row in rows], [row["mask"] for row in rows])
    lent = padded([row["other_ids"] for row in rows], [row["other_mask"] for row in rows])
    values = {"ref_logps": "ref", "ref_KL_logps": "other_ref", "label": "label"}
    return {
        **own,
        **{f"KL_{name}": tensor for name, tensor in lent.items()},
        **{name: torch.tensor([row[ours] for row in rows]) for name, ours in values.items()},
    }


def padded(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Pad B rows to (B, T) ids, attention mask and mask of the sampled tokens, by the names that TRL wants."""
    lengths = torch.tensor([len(row) for row in ids])
    tokens = pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (torch.arange(tokens.shape[1]) < lengths[:, None]).long(),
        "completion_mask": pad_sequence([torch.tensor(mask) for mask in masks], batch_first=True),
    }


def answer_logprobs(trainer: LightningTrainer, rows: Sequence[Row]) -> list[float]:
    """Return the log-probability of the sampled tokens of each row under the policy's present weights."""
    scored = trainer.logprobs([ids for ids, _ in rows])
    return [math.fsum(compress(scores, mask)) for scores, (_, mask) in zip(scored, rows, strict=True)]


def measured(method: str, trainer: LightningTrainer, lessons: Sequence[Example]) -> dict[str, float]:
    """Return the numbers of held-out lessons under the present weights; {} if there is nothing to compare.

    sft: the mean cross-entropy (nats) of the answers' tokens. Else the share of comparisons in which the better answer
    is the likelier, and by how many nats it is on average: dpo's of each pair, kto's of each answer with thumbs up with
    each with thumbs down.
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
    """TRL's trainer and settings, how lessons become its rows and its batches, and our names for what it logs."""

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
