"""`train --method sft`: fine-tunes the adapter on the best rollouts of the store, with TRL's SFTTrainer.

RAFT (https://arxiv.org/abs/2304.06767) keeps the best answers to each prompt, STaR (https://arxiv.org/abs/2203.14465)
the right ones. RFT (https://arxiv.org/abs/2308.01825) shows that different answers teach more than copies.

What the policy sampled keeps its exact tokens. An answer of another model has none of the policy's: the policy's chat
template shows its messages, once, and the answer's tokens are what it adds to the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from ...core.config.trainer import TrainerConfig
from ...core.records import ModelCall
from ...core.tokens import NO_TOKEN_IDS, NOT_THE_POLICY
from ...store.store import Store
from ...trainer.report.batch_metrics import Seen
from ...trainer.rows.rendered import CANNOT_BE_SHOWN, as_shown, shown, tokens_of
from ...trainer.step.trainer import LightningTrainer
from ...trainer.types import Sample, Sift
from .config import TuneConfig
from .lessons import (
    Lessons,
    NothingToLearn,
    RewardedRollout,
    RolloutReader,
    has_own_tokens,
    lessons_of,
    what_was_left_out,
    with_tokens,
)
from .run import FitCallback, Recipe, arguments

IGNORED = -100  # the label of a token that is not in the loss
# Rows are packed into blocks of so many tokens, or as long as the longest row. Attention costs a block's square.
BLOCK_TOKENS = 1024
Traces = Lessons[Sample]


async def _read(store: Store, trainer: LightningTrainer, sift: Sift | None, among: Collection[str] | None) -> Traces:
    return await TraceReader(
        trainer.settings, store, trainer.tokenizer, trainer.max_tokens, trainer.vocabulary, sift
    ).read(among)


def _tuner(
    trainer: LightningTrainer, traces: Sequence[Sample], directory: Path, watch: FitCallback
) -> tuple[SFTTrainer, int]:
    packing = Packing.of(traces, trainer.settings.section(TuneConfig).sft.batch_tokens)
    sft = SFTTrainer(
        model=trainer.model,
        args=_sft_config(trainer, directory, packing),
        train_dataset=dataset(traces),
        processing_class=trainer.tokenizer,
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


class TraceReader:
    """Reads traces from the store."""

    def __init__(
        self,
        config: TrainerConfig,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        vocabulary: int | None = None,
        sift: Sift | None = None,
    ) -> None:
        """A row has at most `max_tokens` tokens. `vocabulary` is the number of the model's tokens (None: any)."""
        self._config = config.section(TuneConfig).sft
        as_lesson = partial(as_trace, tokenizer=tokenizer)
        self._rollouts = RolloutReader(config, store, as_lesson, max_tokens, vocabulary, sift)

    async def read(self, among: Collection[str] | None = None) -> Traces:
        """Return the best rollouts of each task, among all or `among` these. Raises NothingToLearn without any.

        The best have at least the reward `sft.min_reward`; the highest come first, and the newest among equals. At most
        `sft.top` of a task are taken, no two of them with the same tokens.
        """
        seen = Seen()
        rewarded = await self._rollouts.rewarded(among, seen)
        tasks: dict[str, list[RewardedRollout]] = {}
        for good in sorted((r for r in rewarded if self._is_good(r.reward)), key=lambda r: -r.reward):
            tasks.setdefault(good.siblings, []).append(good)
        if not tasks:
            raise NothingToLearn(self._why_none_is_good([r.reward for r in rewarded]))
        ordered = self._rollouts.in_order(tasks)
        found = [rows for task in ordered if (rows := await self._best(tasks[task], seen))]
        if not found:
            raise NothingToLearn(
                f"nothing to learn from: {sum(map(len, tasks.values()))} rollouts have a reward that is high enough, "
                f"and no call of theirs can be learned from: {what_was_left_out(seen) or 'they have none'}"
            )
        return lessons_of(found, self._config.held_out, seen, calls_untokenised=float(seen.counts["calls_untokenised"]))

    def _is_good(self, reward: float) -> bool:
        least = self._config.min_reward
        return reward > 0 if least is None else reward >= least

    async def _best(self, rollouts: Sequence[RewardedRollout], seen: Seen) -> list[Sample]:
        """The rows of a task's best rollouts that differ and can be learned from; `rollouts` come best first."""
        found: dict[Any, tuple[Sample, ...]] = {}
        for rollout, *_ in rollouts:
            rows = await self._rollouts.rows(rollout, seen)
            if rows:
                found.setdefault(tuple((s.token_ids, s.mask) for s in rows), rows)
            if len(found) == self._config.top:
                break
        return [row for rows in found.values() for row in rows]

    def _why_none_is_good(self, rewards: Sequence[float]) -> str:
        if not rewards:
            return "nothing to learn from: no rollout of mode train is completed and has a reward"
        least = self._config.min_reward
        wanted = "above 0" if least is None else f"of at least {least:g}"
        return (
            f"nothing to learn from: none of {len(rewards)} rollouts has a reward {wanted}; theirs are from "
            f"{min(rewards):g} to {max(rewards):g}, {fmean(rewards):.3g} on average (tune.sft.min_reward, "
            "--min-reward)"
        )


def as_trace(call: ModelCall, tokenizer: PreTrainedTokenizerBase) -> ModelCall | None:
    """Return the call with tokens to imitate, at log-probability 0; unchanged if it is of no use.

    None if it has to be tokenised, and the chat template does not show its answer after the prompt.
    """
    if has_own_tokens(call):
        return with_tokens(call, call.prompt_token_ids, call.response_token_ids)
    if call.untrainable_reason not in (NOT_THE_POLICY, NO_TOKEN_IDS) or not call.is_decision or len(call.choices) > 1:
        return call
    tokens = _tokenised(call, tokenizer) if call.endpoint == "chat/completions" else None
    return tokens and with_tokens(call, *tokens)


def _tokenised(call: ModelCall, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """The tokens of prompt and answer, tokenised apart, as the policy would see the one and sample the other."""
    try:
        (choice,), messages = call.response["choices"], [as_shown(m) for m in call.request["messages"]]
        prompt = shown(tokenizer, call.request, messages, add_generation_prompt=True)
        text = shown(tokenizer, call.request, [*messages, as_shown(choice["message"])])
        cut = choice.get("finish_reason") == "length"
    except CANNOT_BE_SHOWN:
        return None
    if not text.startswith(prompt):
        return None
    answer = tokens_of(tokenizer, text[len(prompt) :])
    return tokens_of(tokenizer, prompt), _ended(answer, tokenizer.eos_token_id, cut=cut)


def _ended(ids: list[int], end: int | None, *, cut: bool) -> list[int]:
    """The answer up to and with the token that ends it; without that token if it was `cut` off."""
    if end is None:
        return ids
    last = len(ids) - 1 - ids[::-1].index(end) if end in ids else len(ids)
    return ids[:last] + ([] if cut else [end])
