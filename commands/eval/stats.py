"""The statistics of `eval`: pass@k, intervals and paired comparisons over tasks.

The tasks are the sample and siblings of one task are alike, so tasks are resampled, never rollouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.statistics import RESAMPLES, Interval, bootstrap_mean

EXACT_UP_TO = 13  # tasks: no more sign patterns than resamples


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far one row is above another, as a mean over tasks. `p` is that of a two-sided sign-flip test."""

    difference: float
    interval: Interval
    p: float
    tasks: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased chance that at least one of k rollouts passes, if c of n did. Needs n >= k.

    Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} in {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def compare(values: Sequence[float], others: Sequence[float], seed: int) -> Comparison:
    """Compare `values` with `others`, paired: both have the same tasks in the same order."""
    differences = np.asarray(values, dtype=float) - np.asarray(others, dtype=float)
    interval = bootstrap_mean(differences.tolist(), seed)
    return Comparison(float(differences.mean()), interval, sign_flip_p(differences.tolist(), seed), len(differences))


def sign_flip_p(differences: Sequence[float], seed: int) -> float:
    """Return how often random signs give a mean at least as far from 0 (Fisher's permutation test).

    For few tasks it tries all patterns of signs; otherwise random ones, and the one that was seen.
    """
    given = np.asarray(differences, dtype=float)
    seen = abs(given.sum()) - 1e-9  # the same numbers in another order may sum to a little less
    if len(given) <= EXACT_UP_TO:
        patterns = itertools.product((-1.0, 1.0), repeat=len(given))
        return float(np.mean([abs(np.dot(signs, given)) >= seen for signs in patterns]))
    rng = np.random.default_rng(seed)
    flipped = (abs(np.dot(rng.choice((-1.0, 1.0), len(given)), given)) >= seen for _ in range(RESAMPLES))
    return (1 + sum(map(bool, flipped))) / (1 + RESAMPLES)


def ks(samples: int) -> list[int]:
    """Return the k of pass@k to show: 1, 2, 4, … and the number of samples itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples}) if samples > 0 else []
