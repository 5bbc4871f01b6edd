"""Samples (training rows) from the calls of a rollout: exact token-prefix merging, masks, weights. Pure, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_proxy.proxy.types import ModelCall
from lightning_proxy.trainer.types import Sample


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    """The rows of one rollout, and how many calls and rows were left out.

    `untrainable_calls`: without usable token ids. `ambiguous_calls`: n > 1, so the reward belongs to no one answer.
    """

    samples: tuple[Sample, ...]
    untrainable_calls: int = 0
    ambiguous_calls: int = 0
    long_rows: int = 0


@dataclass(slots=True)
class _Row:
    """A row under construction; all lists grow together."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)

    def add_context(self, token_ids: Sequence[int]) -> None:
        n = len(token_ids)
        self.token_ids += token_ids
        self.mask += [0] * n
        self.logprobs += [0.0] * n
        self.advantages += [0.0] * n
        self.temperatures += [1.0] * n

    def add_answer(self, call: ModelCall, advantage: float) -> None:
        n = len(call.response_token_ids)
        self.token_ids += call.response_token_ids
        self.mask += [1] * n
        self.logprobs += call.logprobs
        self.advantages += [advantage] * n
        self.temperatures += [call.temperature] * n
        self.call_ids.append(call.call_id)

    def sample(self, rollout_id: str, task_id: str) -> Sample:
        return Sample(
            rollout_id=rollout_id,
            task_id=task_id,
            token_ids=tuple(self.token_ids),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            advantages=tuple(self.advantages),
            temperatures=tuple(self.temperatures),
            call_ids=tuple(self.call_ids),
        )


def rollout_samples(
    calls: Sequence[ModelCall], advantages: Sequence[float], *, task_id: str, max_tokens: int
) -> RolloutSamples:
    """Merge `calls` (of one rollout, in order, one advantage each) into rows of at most `max_tokens` tokens.

    A call continues the longest row that its prompt begins with, token by token; else, or where the row would become
    too long, it opens a new one.
    """
    rows: list[_Row] = []
    left_out: Counter[str] = Counter()
    for call, advantage in zip(calls, advantages, strict=True):
        reason = _unusable(call)
        if reason:
            left_out[reason] += 1
            continue
        row = _continued(rows, call.prompt_token_ids)
        if row is None or len(call.prompt_token_ids) + len(call.response_token_ids) > max_tokens:
            row = _Row()
            rows.append(row)
        row.add_context(call.prompt_token_ids[len(row.token_ids) :])
        row.add_answer(call, advantage)
    kept = [row for row in rows if len(row.token_ids) <= max_tokens]
    rollout_id = calls[0].rollout_id if calls else ""
    return RolloutSamples(
        samples=tuple(row.sample(rollout_id, task_id) for row in kept),
        untrainable_calls=left_out["untrainable"],
        ambiguous_calls=left_out["ambiguous"],
        long_rows=len(rows) - len(kept),
    )


def rollout_weights(samples: Iterable[Sample]) -> dict[str, float]:
    """1 / (trained tokens) of each rollout: with it all rollouts weigh the same, whatever their rows and tokens."""
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.rollout_id] += sample.trained_tokens
    return {rollout_id: 1.0 / n for rollout_id, n in tokens.items() if n}


def _unusable(call: ModelCall) -> str | None:
    if len(call.choices) > 1:
        return "ambiguous"
    # Temperature 0 is greedy: there is no sampling distribution to take the gradient of.
    usable = call.trainable and call.prompt_token_ids and call.response_token_ids and call.temperature > 0
    return None if usable else "untrainable"


def _continued(rows: Sequence[_Row], prompt: tuple[int, ...]) -> _Row | None:
    matching = (row for row in rows if prompt[: len(row.token_ids)] == tuple(row.token_ids))
    return max(matching, key=lambda row: len(row.token_ids), default=None)
