"""Scores recorded rows under the present weights: every shared prefix is computed once. No gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..rows.microbatches import MicroBatch, TreeCost, micro_batches
from ..types import Sample
from .scoring import ScoredTokens


def fully_scored(token_ids: tuple[int, ...], adapter: str) -> Sample:
    """Return a sample in which every token but the first is scored, at temperature 1."""
    n = len(token_ids)
    mask, zeros, ones = ((0,) + (1,) * (n - 1))[:n], (0.0,) * n, (1.0,) * n
    return Sample("", "", token_ids, mask, zeros, zeros, ones, adapter=adapter)


def logprobs_of(
    samples: Sequence[Sample], cost: TreeCost, score: Callable[[MicroBatch], ScoredTokens]
) -> list[list[float]]:
    """Return a log-probability for each token of each sample, as it was sampled; 0.0 for context.

    It is -inf where the way of sampling leaves a token out.
    """
    found = [[0.0] * len(sample.token_ids) for sample in samples]
    numbered = [replace(s, rollout_id=str(i)) for i, s in enumerate(samples) if s.trained_tokens]
    for micro_batch in micro_batches(numbered, cost):
        for sample, values in zip(micro_batch.samples, score(micro_batch).logprobs.tolist(), strict=True):
            found[int(sample.rollout_id)] = values[: len(sample.token_ids)]
    return found
