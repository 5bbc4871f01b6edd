"""Computes how sure a mean over tasks is. The tasks are the sample: rollouts of one task are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
MEMORY = 1_000_000  # numbers held at once


@dataclass(frozen=True, slots=True)
class Interval:
    """The two values between which a mean is likely to be."""

    low: float
    high: float


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (of all there are); infinite where the values are too large for a sum."""
    with np.errstate(all="ignore"):
        return float(np.mean(values)), float(np.std(values))


def bootstrap_mean(values: Sequence[float], seed: int, weights: Sequence[float] | None = None) -> Interval:
    """Return the 95 % interval of the mean of `values`, one per task, by the percentile bootstrap over tasks.

    With only one task it has no width. `weights`: what each task counts for in the mean; the same by default.
    """
    tasks, rng = np.asarray(values, dtype=float), np.random.default_rng(seed)
    counts = np.ones(len(tasks)) if weights is None else np.asarray(weights, dtype=float)
    at_once = max(1, MEMORY // len(tasks))
    sizes = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    with np.errstate(all="ignore"):
        drawn = [rng.integers(0, len(tasks), (size, len(tasks))) for size in sizes]
        means = [(tasks * counts)[one].sum(axis=1) / counts[one].sum(axis=1) for one in drawn]
        low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(low), float(high))
