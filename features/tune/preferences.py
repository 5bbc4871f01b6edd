"""`train --method dpo` and `kto`: learns from the better and the worse of recorded answers, with TRL's trainers.

DPO (https://arxiv.org/abs/2305.18290) makes the adapter prefer the better of two siblings. Both answers follow the same
prompt, token by token; of a rollout with several rows the first counts. KTO (https://arxiv.org/abs/2402.01306) needs to
know only whether an answer is good: it raises those with thumbs up and lowers the others, and its KL is measured on
each row's prompt with the answer of the row before it.

TRL tokenises text and trains every token after the prompt. Here rows come with the tokens that were sampled, and only
these are in the loss: what tools returned is context. The reference is the weights that the run starts from.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, compress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from ...core.config.trainer import TrainerConfig
from ...store.store import Store
from ...trainer.report.batch_metrics import Seen
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Sample, Sift
from .config import TuneConfig
from .lessons import Lessons, NothingToLearn, RewardedRollout, RolloutReader, as_sampled, lessons_of, what_was_left_out
from .run import FitCallback, Recipe, arguments

PASS_TOKENS = 1024  # of the pairs that are computed together


class SampledReader:
    """Reads from the store what a method learns preferences from."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        max_tokens: int,
        vocabulary: int | None = None,
        sift: Sift | None = None,
    ) -> None:
        """A row has at most `max_tokens` tokens. `vocabulary` is the number of the model's tokens (None: any)."""
        self._dpo, self._kto = config.section(TuneConfig).dpo, config.section(TuneConfig).kto
        self._rollouts = RolloutReader(config, store, as_sampled, max_tokens, vocabulary, sift)


class Pair(NamedTuple):
    """The rows of two siblings with the same prompt; `chosen` got more reward than `rejected`."""

    chosen: Sample
    rejected: Sample


Pairs = Lessons[Pair]


class PairReader(SampledReader):
    """Reads pairs from the store."""

    async def read(self, among: Collection[str] | None = None) -> Pairs:
        """Return the pairs of each task, of all rollouts or `among` these. Raises NothingToLearn without any.

        Rewards differ by `dpo.margin` at least. At most `dpo.pairs_per_task` of a task are taken: of rollouts that are
        in the fewest pairs yet, and among these those that differ most.
        """
        seen = Seen()
        tasks: dict[str, list[RewardedRollout]] = {}
        for one in await self._rollouts.rewarded(among, seen):
            if one.rollout.task_id is not None:
                tasks.setdefault(one.siblings, []).append(one)
        differing = {task: of_task for task, of_task in tasks.items() if self._differ(of_task)}
        if not differing:
            raise NothingToLearn(
                f"nothing to prefer: in none of {len(tasks)} tasks do two rewarded rollouts differ by "
                f"{self._dpo.margin:g} or more (tune.dpo.margin)"
            )
        ordered = self._rollouts.in_order(differing)
        found = [pairs for task in ordered if (pairs := await self._of_task(differing[task], seen))]
        if not found:
            others = seen.counts["pairs_other_prompt"]
            reasons = [f"{others} pairs of different prompts" if others else "", what_was_left_out(seen)]
            raise NothingToLearn(
                f"nothing to prefer: the rewards of {len(differing)} tasks differ, and no two of their rollouts make a "
                f"pair: {', '.join(filter(None, reasons)) or 'their answers are the same'}"
            )
        chosen = lessons_of(found, self._dpo.held_out, seen)
        counts = {
            "pairs": float(len(chosen.train)),
            "pairs_held_out": float(len(chosen.held_out)),
            "pairs_other_prompt": float(seen.counts["pairs_other_prompt"]),
        }
        return replace(chosen, metrics=chosen.metrics | counts)

    def _differ(self, rollouts: Sequence[RewardedRollout]) -> bool:
        rewards = [one.reward for one in rollouts]
        return max(rewards) - min(rewards) >= self._dpo.margin

    async def _of_task(self, rollouts: Sequence[RewardedRollout], seen: Seen) -> list[Pair]:
        rows = [(one.reward, made[0]) for one in rollouts if (made := await self._rollouts.rows(one.rollout, seen))]
        ranked = sorted(rows, key=lambda row: -row[0])
        apart = [(a[0] - b[0], Pair(a[1], b[1])) for a, b in combinations(ranked, 2)]
        widest = sorted((one for one in apart if one[0] >= self._dpo.margin), key=lambda one: -one[0])
        distinct: dict[Any, Pair] = {}
        for _, pair in widest:
            if pair.chosen.token_ids != pair.rejected.token_ids:
                distinct.setdefault((pair.chosen.token_ids, pair.rejected.token_ids), pair)
        candidates = [pair for pair in distinct.values() if _same_prompt(pair)]
        seen.counts["pairs_other_prompt"] += len(distinct) - len(candidates)
        return self._least_used(candidates)

    def _least_used(self, candidates: list[Pair]) -> list[Pair]:
        """Up to `dpo.pairs_per_task` of them, each time one whose rollouts are in the fewest pairs yet."""
        used: Counter[str] = Counter()
        found: list[Pair] = []
        while candidates and len(found) < self._dpo.pairs_per_task:
            pair = min(candidates, key=lambda p: used[p.chosen.rollout_id] + used[p.rejected.rollout_id])
            candidates.remove(pair)
            used.update([pair.chosen.rollout_id, pair.rejected.rollout_id])
            found.append(pair)
        return found


def _same_prompt(pair: Pair) -> bool:
    first, second = (sample.token_ids[: sample.mask.index(1)] for sample in pair)
    return first == second


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


class PairTrainer(GivenRows, DPOTrainer):
    """A DPOTrainer over rows of token ids, each with a mask of what was sampled and a log-probability to refer to."""


async def _read_pairs(
    store: Store, trainer: LightningTrainer, sift: Sift | None, among: Collection[str] | None
) -> Pairs:
    return await PairReader(trainer.settings, store, trainer.max_tokens, trainer.vocabulary, sift).read(among)


def _dpo_tuner(
    trainer: LightningTrainer, pairs: Sequence[Pair], directory: Path, watch: FitCallback
) -> tuple[PairTrainer, int]:
    lengths = [len(sample.token_ids) for pair in pairs for sample in pair]
    referred, longest = pair_dataset(trainer, pairs), 2 * max(lengths)
    in_a_step = max(1, trainer.settings.section(TuneConfig).dpo.batch_tokens // longest)
    dpo = PairTrainer(
        model=trainer.model,
        args=dpo_config(trainer, directory, in_a_step, PASS_TOKENS // longest),
        data_collator=collate_pairs,
        train_dataset=referred,
        processing_class=trainer.tokenizer,
        callbacks=[watch],
    )
    return dpo, sum(lengths)


def _measured_pairs(trainer: LightningTrainer, pairs: Sequence[Pair]) -> dict[str, float]:
    return measured(margins(trainer, pairs))


def _learned(last: Mapping[str, float]) -> dict[str, float]:
    return {"preference_margin": last["rewards/margins"], "preference_accuracy": last["rewards/accuracies"]}


def margins(trainer: LightningTrainer, pairs: Sequence[Pair]) -> list[float]:
    """Return by how many nats the chosen answer of each pair is likelier than the rejected one."""
    scores = answer_logprobs(trainer, [sample for pair in pairs for sample in pair])
    return [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]


def pair_dataset(trainer: LightningTrainer, pairs: Sequence[Pair]) -> Dataset:
    """Return the pairs as rows for `collate_pairs`, referred to the policy's present weights."""
    scores = answer_logprobs(trainer, [sample for pair in pairs for sample in pair])
    return Dataset.from_dict({
        "chosen_ids": [list(pair.chosen.token_ids) for pair in pairs],
        "chosen_mask": [list(pair.chosen.mask) for pair in pairs],
        "rejected_ids": [list(pair.rejected.token_ids) for pair in pairs],
        "rejected_mask": [list(pair.rejected.mask) for pair in pairs],
        "ref_chosen_logps": scores[::2],
        "ref_rejected_logps": scores[1::2],
    })  # fmt: skip


def collate_pairs(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
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


DPO = Recipe("dpo", _read_pairs, _dpo_tuner, _measured_pairs, _learned)


class Thumb(NamedTuple):
    """A row, and whether its rollout is a good one."""

    sample: Sample
    up: bool


Thumbs = Lessons[Thumb]


class ThumbReader(SampledReader):
    """Reads rows with thumbs from the store."""

    async def read(self, among: Collection[str] | None = None) -> Thumbs:
        """Return the rows of all rollouts or `among` these; up is a reward above `kto.threshold`.

        Raises NothingToLearn without at least two rows to learn from.
        """
        seen = Seen()
        tasks: dict[str, list[Thumb]] = {}
        for one in await self._rollouts.rewarded(among, seen):
            rows = await self._rollouts.rows(one.rollout, seen)
            if rows:
                up = one.reward > self._kto.threshold
                tasks.setdefault(one.task, []).extend(Thumb(row, up) for row in rows)
        found = [tasks[task] for task in self._rollouts.in_order(tasks)]
        thumbs = lessons_of(found, self._kto.held_out, seen)
        if len(thumbs.train) < 2:
            raise NothingToLearn(
                f"nothing to learn from: {seen.rollouts} rollouts of mode train are completed and have a reward, with "
                f"{len(thumbs.train)} rows to learn from, and KTO needs two. {what_was_left_out(seen)}".strip()
            )
        liked = sum(thumb.up for thumb in thumbs.train)
        counts = {"thumbs_up": float(liked), "thumbs_down": float(len(thumbs.train) - liked)}
        return Thumbs(tuple(sorted(thumbs.train, key=_mixed)), thumbs.held_out, thumbs.metrics | counts)


def _mixed(thumb: Thumb) -> bytes:
    """A sort key that looks random: neighbours lend each other their answers, and should be of different tasks."""
    return hashlib.sha256(repr((thumb.sample.rollout_id, thumb.sample.call_ids)).encode()).digest()


class ThumbTrainer(GivenRows, KTOTrainer):
    """A KTOTrainer over rows of token ids, each with a mask of what was sampled and log-probabilities to refer to."""


async def _read_thumbs(
    store: Store, trainer: LightningTrainer, sift: Sift | None, among: Collection[str] | None
) -> Thumbs:
    return await ThumbReader(trainer.settings, store, trainer.max_tokens, trainer.vocabulary, sift).read(among)


def _kto_tuner(
    trainer: LightningTrainer, thumbs: Sequence[Thumb], directory: Path, watch: FitCallback
) -> tuple[ThumbTrainer, int]:
    rows = thumb_dataset(trainer, thumbs)
    longest = max(len(row[ids]) for row in rows for ids in ("ids", "KL_ids"))
    kto = ThumbTrainer(
        model=trainer.model,
        args=kto_config(trainer, directory, max(2, trainer.settings.section(TuneConfig).kto.batch_tokens // longest)),
        data_collator=collate_thumbs,
        train_dataset=rows,
        processing_class=trainer.tokenizer,
        callbacks=[watch],
    )
    return kto, sum(len(row["ids"]) + len(row["KL_ids"]) for row in rows)


def _measured_thumbs(trainer: LightningTrainer, thumbs: Sequence[Thumb]) -> dict[str, float]:
    return measured(thumb_margins(trainer, thumbs))


def thumb_margins(trainer: LightningTrainer, thumbs: Sequence[Thumb]) -> list[float]:
    """Return by how many nats each answer with thumbs up is likelier than each with thumbs down."""
    scores = answer_logprobs(trainer, [thumb.sample for thumb in thumbs])
    up, down = ([s for s, thumb in zip(scores, thumbs, strict=True) if thumb.up is good] for good in (True, False))
    return [a - b for a in up for b in down]


def thumb_dataset(trainer: LightningTrainer, thumbs: Sequence[Thumb]) -> Dataset:
    """Return rows for `collate_thumbs`, referred to the present weights; the first is lent the last one's answer."""
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


def collate_thumbs(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
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


KTO = Recipe("kto", _read_thumbs, _kto_tuner, _measured_thumbs)
