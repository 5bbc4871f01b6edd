"""Turns samples into a Tinker service's training data, and its log-probabilities into a step's metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from ...core.config.trainer import TrainerConfig
from ...trainer.types import Sample
from .config import LOSSES, TinkerConfig, TinkerLoss

_MAX_LOG_RATIO = 20.0  # exp() of anything larger is useless in a metric and may overflow


@dataclass(frozen=True, slots=True)
class Datum:
    """One datum. Lists are as long as `tokens`; `targets[i]` is the token after `tokens[i]`.

    `mask[i]` is 1 where the policy sampled `targets[i]`. `advantages` carry the token's weight in the step's loss.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    mask: tuple[int, ...] = ()


def rows_of(samples: Sequence[Sample], weights: Mapping[str, float], reduction: str) -> list[Datum]:
    """Return the rows of a step. `weights` are those of a token, by rollout.

    Every loss of the service is linear in the advantage, so the weights go into it. Where the service takes the `mean`
    over a row's tokens and then over the rows, instead of the `sum`, the advantages undo that.
    """
    rows = []
    for sample in samples:
        ids, weight = sample.token_ids, weights[sample.rollout_id]
        weight *= _divisor(len(ids) - 1, len(samples), reduction)
        advantages = tuple(weight * value for value in sample.advantages[1:])
        rows.append(Datum(ids[:-1], ids[1:], sample.logprobs[1:], advantages, sample.mask[1:]))
    return rows


def _divisor(tokens: int, rows: int, reduction: str) -> float:
    """The number by which the service divides the loss of a row of so many tokens."""
    return float(tokens * rows) if reduction == "mean" else 1.0


def is_plain(sample: Sample) -> bool:
    """Return whether all of its answers were sampled at temperature 1 and nothing else: the service scores no other."""
    return not sample.shaped and all(value == 1.0 for value in compress(sample.temperatures, sample.mask))


def loss_of(config: TrainerConfig) -> TinkerLoss:
    """Return the service's name of the loss."""
    return LOSSES[config.loss_type] if (loss := config.section(TinkerConfig).loss) == "auto" else loss


def clip_limits(config: TrainerConfig) -> tuple[float, float]:
    """Return the least and greatest importance ratio that are not clipped."""
    match loss_of(config):
        case "ppo":
            return 1 - config.clip_low, 1 + config.clip_high
        case "cispo":
            return 0.0, min(config.cap, 1e6)  # JSON has no infinity
        case _:
            return 0.0, math.inf


def loss_config(config: TrainerConfig) -> dict[str, float] | None:
    """Return the thresholds that the service is given; None for a loss without any."""
    low, high = clip_limits(config)
    return None if math.isinf(high) else {"clip_low_threshold": low, "clip_high_threshold": high}


def numbers_of(rows: Sequence[Datum], logprobs: Sequence[Sequence[float]], config: TrainerConfig) -> dict[str, float]:
    """Return a step's loss, ratios and KL by the names of `metric_schema`. `logprobs` are the policy's, by target."""
    mask = np.concatenate([np.asarray(row.mask, bool) for row in rows])
    ours = np.concatenate([np.asarray(values, np.float64) for values in logprobs])[mask]
    theirs = np.concatenate([np.asarray(row.logprobs, np.float64) for row in rows])[mask]
    divisors = [_divisor(len(row.tokens), len(rows), config.section(TinkerConfig).reduction) for row in rows]
    advantages = np.concatenate([np.asarray(r.advantages, np.float64) / d for r, d in zip(rows, divisors, strict=True)])
    advantages = advantages[mask]
    log_ratios = ours - theirs
    ratios = np.exp(np.minimum(log_ratios, _MAX_LOG_RATIO))
    low, high = clip_limits(config)
    clipped = (ratios < low) & (advantages < 0) | (ratios > high) & (advantages > 0)
    n = max(len(ratios), 1)
    return {
        "loss": float(_terms(loss_of(config), ratios, ours, advantages, low, high).sum()),
        "kl": float((ratios - 1 - log_ratios).sum()) / n,
        "ratio_mean": float(ratios.sum()) / n,
        "ratio_max": float(ratios.max(initial=0.0)),
        "clip_share": float(clipped.sum()) / n,
        "trained_tokens": float(len(ratios)),
    }


def _terms(
    loss: TinkerLoss, ratios: np.ndarray, logprobs: np.ndarray, advantages: np.ndarray, low: float, high: float
) -> np.ndarray:
    """The loss of each token, as the API documents it."""
    match loss:
        case "ppo":
            return -np.minimum(ratios * advantages, np.clip(ratios, low, high) * advantages)
        case "cispo":
            return -np.clip(ratios, low, high) * logprobs * advantages
        case _:
            return -ratios * advantages
