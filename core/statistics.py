"""How sure a mean over tasks is, and how sure one can be that a candidate is worse than the live version. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
MEMORY = 1_000_000  # numbers held at once

Verdict = Literal["worse", "safe", "undecided"]
Floats = NDArray[np.float64]

LEAST_SHARE, MOST_SHARE, BETTORS = 0.05, 0.9, 8
SHARES: Floats = np.geomspace(LEAST_SHARE, MOST_SHARE, BETTORS)
MOST_LOG = 700.0  # above it a float has no power of e
HALVINGS = 40  # of the width 2: finer than anybody reads


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


class Evidence:
    """The evidence of one metric's pairs so far: two e-values, and the verdict that was reached first.

    Each pair is one difference in [-1, 1]: the candidate minus the live version, scaled by the metric's range, positive
    is better. Against a hypothesis "the mean is at most m" a bettor starts with the wealth 1 and bets a share c of it
    on each pair; a pair multiplies the wealth by

        1 + c * ((1 + d) / (1 + m) - 1)        with 0 < c < 1

    which stays positive and is 1 or less on average while the hypothesis holds. The wealth is then a test
    supermartingale, and so is the mean over several bettors. By Ville's inequality it ever reaches 1 / level with a
    chance of at most `level`, however often one looks. These are the bets of Waudby-Smith and Ramdas, "Estimating means
    of bounded random variables by betting", JRSS B 86 (2024), doi 10.1093/jrsssb/qkad009, with a fixed mixture in the
    place of one bettor who learns what to bet. Written with lambda = c / (1 + m), the factor is 1 + lambda * (d - m).

    It is exact if each difference, given the earlier ones, has a mean on the hypothesis' side. So siblings of one task
    are one pair: `difference` compares their means. And pairs are taken in the order in which they began: taken as they
    end, a candidate that is slow to fail looks better than it is.

    `margin`: the drop, as a share of the metric's range, that must not go live. `level`: the greatest chance that an
    equal candidate is called worse, and that one with a drop of `margin` or more is called safe. Of several `metrics`
    each has its share of `level` to call a candidate worse, since one of them is enough for that. To call it safe each
    has the full `level`, since all of them have to (an intersection-union test).

    The same differences in the same order always give the same evidence.
    """

    def __init__(self, margin: float, level: float, metrics: int = 1) -> None:
        if not 0 < margin < 1 or not 0 < level < 1 or metrics < 1:
            raise ValueError(
                f"margin and level are between 0 and 1: {margin}, {level}, and there are metrics: {metrics}"
            )
        self.margin, self.level, self.metrics = margin, level, metrics
        self.pairs = 0
        self.worse_at: int | None = None  # the number of pairs after which it was first reached
        self.safe_at: int | None = None
        self._sum = 0.0
        self._drop, self._safe = np.zeros(BETTORS), np.zeros(BETTORS)  # logarithms of each bettor's wealth

    def add(self, difference: float) -> None:
        """Take in one pair. ValueError if it is not in [-1, 1]."""
        self.extend((difference,))

    def extend(self, differences: Iterable[float]) -> None:
        """Take in pairs, as one `add` after another would; all or none. ValueError if one is not in [-1, 1]."""
        given = _checked(differences)
        drop = _wealth(self._drop, -given, 0.0)
        safe = _wealth(self._safe, given, -self.margin)
        if self.worse_at is None:
            self.worse_at = self._first(drop, math.log(self.metrics / self.level))
        if self.safe_at is None:
            self.safe_at = self._first(safe, math.log(1 / self.level))
        self._drop, self._safe = drop[-1], safe[-1]
        for value in given.tolist():
            self._sum += value
        self.pairs += len(given)

    @property
    def mean(self) -> float | None:
        """The mean difference so far; None before the first pair."""
        return self._sum / self.pairs if self.pairs else None

    @property
    def e_drop(self) -> float:
        """The e-value against "no drop" after the last pair. It may have been higher before."""
        return math.exp(min(float(_log_mean(self._drop)), MOST_LOG))

    @property
    def e_safe(self) -> float:
        """The e-value against "a drop of `margin` or more" after the last pair. It may have been higher before."""
        return math.exp(min(float(_log_mean(self._safe)), MOST_LOG))

    @property
    def verdict(self) -> Verdict:
        """The verdict that was reached first; `worse` if both were at the same pair. It never changes again."""
        if self.worse_at is not None and (self.safe_at is None or self.worse_at <= self.safe_at):
            return "worse"
        return "undecided" if self.safe_at is None else "safe"

    def _first(self, wealth: Floats, threshold: float) -> int | None:
        reached = np.flatnonzero(_log_mean(wealth[1:]) >= threshold)
        return self.pairs + int(reached[0]) + 1 if len(reached) else None


def interval(differences: Iterable[float], level: float = 0.05, metrics: int = 1) -> Interval | None:
    """Return the means that the pairs do not exclude yet; None without a pair.

    A confidence sequence: the true mean is ever below `low` with a chance of at most `level`, and ever above `high`
    with one of at most `level / metrics`, however often one looks. It is made of the same bets as the verdict: e_safe
    is above its threshold where `low` is above -margin, and e_drop where `high` is below 0.
    """
    given = _checked(differences)
    if not len(given):
        return None
    return Interval(_low(given, math.log(1 / level)), -_low(-given, math.log(metrics / level)))


def difference(candidate: Sequence[float], live: Sequence[float], low: float, high: float) -> float:
    """Return how far the candidate's siblings are above those of the live version: one pair, in [-1, 1].

    The mean of one side minus the mean of the other, by the range `low` to `high`. Values outside of it count as its
    ends. ValueError if a side has no value or the range none.
    """
    half = high / 2 - low / 2  # halves, so that no range is too large for a float
    if not candidate or not live or not half > 0:
        raise ValueError(f"{len(candidate)} and {len(live)} values to compare, from {low} to {high}")
    ours, theirs = (
        sum((min(max(value, low), high) / 2 - low / 2) / half for value in side) / len(side)
        for side in (candidate, live)
    )
    return min(max(ours - theirs, -1.0), 1.0)


def compare_signs(candidate: float, live: float) -> int:
    """Return 1 if the candidate's value is higher, -1 if it is lower, and 0 if they are equal."""
    return (candidate > live) - (candidate < live)


def sign_difference(candidate: Sequence[float], live: Sequence[float]) -> float:
    """Return how much more often the candidate's value is higher than lower: one pair, in [-1, 1].

    Over every pairing of two siblings: for metrics without bounds (latency, length), of which only the order counts.
    Where a lower value is better, swap the sides. ValueError if a side has no value.
    """
    if not candidate or not live:
        raise ValueError(f"{len(candidate)} and {len(live)} values to compare")
    signs = sum(compare_signs(one, other) for one in candidate for other in live)
    return signs / (len(candidate) * len(live))


def _checked(differences: Iterable[float]) -> Floats:
    given = np.fromiter(differences, dtype=float)
    if not np.all(np.abs(given) <= 1):
        raise ValueError("a difference is not between -1 and 1")
    return given


def _wealth(before: Floats, differences: Floats, at_most: float) -> Floats:
    """Return the logarithms of the wealth against "the mean is at most `at_most`": (1 + pairs, bettors)."""
    odds = (1 + differences) / (1 + at_most) - 1
    return np.cumsum(np.vstack((before, np.log1p(np.outer(odds, SHARES)))), axis=0)


def _log_mean(logs: Floats) -> Floats:
    """Return the logarithm of the mean over the last axis."""
    highest = logs.max(axis=-1, keepdims=True)
    return np.log(np.exp(logs - highest).mean(axis=-1)) + highest[..., 0]


def _low(differences: Floats, threshold: float) -> float:
    """Return the highest mean that is excluded, with all below it; wealth falls where the hypothesis' bound rises."""
    excluded, possible = -1.0, 1.0
    for _ in range(HALVINGS):
        bound = (excluded + possible) / 2
        odds = (1 + differences) / (1 + bound) - 1
        if _log_mean(np.log1p(np.outer(odds, SHARES)).sum(axis=0)) >= threshold:
            excluded = bound
        else:
            possible = bound
    return excluded
