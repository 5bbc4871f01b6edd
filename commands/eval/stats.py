"""The statistics of `eval`: pass@k, intervals and paired comparisons over tasks. Pure.

Tasks are what was drawn from all that the agent may meet, and siblings of one task are alike: so tasks are resampled,
never rollouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
MEMORY = 1_000_000  # numbers held at once
EXACT_UP_TO = 13  # tasks: no more sign patterns than resamples


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % by the percentile bootstrap over tasks; as wide as the tasks differ, of no width for one task alone."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean over tasks of what one row is above another; `p`: two-sided, that signs are there by chance."""

    difference: float
    interval: Interval
    p: float
    tasks: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that of k rollouts drawn from n, of which c passed, one did at least: without bias.

    Chen et al. 2021, arXiv 2107.03374, equation 1. Needs n >= k.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} in {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_mean(values: Sequence[float], seed: int) -> Interval:
    """Of the mean of one value a task, two tasks at least for it to say anything."""
    tasks, rng = np.asarray(values, dtype=float), np.random.default_rng(seed)
    at_once = max(1, MEMORY // len(tasks))
    sizes = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    means = [tasks[rng.integers(0, len(tasks), (size, len(tasks)))].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(low), float(high))


def compare(values: Sequence[float], others: Sequence[float], seed: int) -> Comparison:
    """`values` with `others`, paired: both of the same tasks in the same order."""
    differences = np.asarray(values, dtype=float) - np.asarray(others, dtype=float)
    interval = bootstrap_mean(differences.tolist(), seed)
    return Comparison(float(differences.mean()), interval, sign_flip_p(differences.tolist(), seed), len(differences))


def sign_flip_p(differences: Sequence[float], seed: int) -> float:
    """How often a mean as far from 0 comes about when each difference has either sign (Fisher's permutation test).

    Over all patterns of signs for few tasks; else over so many random ones, and the one that was seen.
    """
    given = np.asarray(differences, dtype=float)
    seen = abs(given.sum()) - 1e-9  # sums of the same numbers in another order are no less
    if len(given) <= EXACT_UP_TO:
        patterns = itertools.product((-1.0, 1.0), repeat=len(given))
        return float(np.mean([abs(np.dot(signs, given)) >= seen for signs in patterns]))
    rng = np.random.default_rng(seed)
    flipped = (abs(np.dot(rng.choice((-1.0, 1.0), len(given)), given)) >= seen for _ in range(RESAMPLES))
    return (1 + sum(map(bool, flipped))) / (1 + RESAMPLES)


def ks(samples: int) -> list[int]:
    """The k of pass@k to show: 1, 2, 4, … and the number of samples itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples}) if samples > 0 else []
