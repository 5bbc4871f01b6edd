"""Intervals and tests for means over tasks, and evidence that a candidate is worse or safe. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
MEMORY = 1_000_000  # numbers held at a time

Verdict = Literal["worse", "safe", "undecided"]
Floats = NDArray[np.float64]

SEED = 0  # of bootstrap and permutations, so that the same rollouts always give the same numbers
EXACT_UP_TO = 13  # tasks: no more sign patterns than resamples
SHARES: Floats = np.geomspace(0.05, 0.9, 8)  # that the bettors bet
MOST_LOG = 700.0  # a larger power of e overflows a float
HALVINGS = 40  # of the width 2: finer than anybody reads


@dataclass(frozen=True, slots=True)
class Interval:
    """The bounds between which a mean is likely to lie."""

    low: float
    high: float


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the population standard deviation; infinite if the values are too large to sum."""
    with np.errstate(all="ignore"):
        return float(np.mean(values)), float(np.std(values))


def bootstrap_mean(
    values: Sequence[float] | Floats, seed: int = SEED, weights: Sequence[float] | None = None
) -> Interval:
    """Return the 95 % interval of the mean of `values`, one per task, by the percentile bootstrap over tasks.

    For a seeds x tasks array, both are resampled independently (Owen 2007). With one task or seed, the interval says
    nothing about others. `weights`: the tasks' weights in the mean, equal by default. The tasks may come in any order.
    """
    by_seed, rng = np.atleast_2d(np.asarray(values, dtype=float)), np.random.default_rng(seed)
    seeds, tasks = by_seed.shape
    counts = np.ones(tasks) if weights is None else np.asarray(weights, dtype=float)
    order = np.lexsort((counts, *by_seed))
    by_seed, counts = by_seed[:, order], counts[order]
    rows, means = max(1, MEMORY // by_seed.size), []
    with np.errstate(all="ignore"):
        for done in range(0, RESAMPLES, rows):
            n = min(rows, RESAMPLES - done)
            of_seeds = by_seed if seeds == 1 else by_seed[rng.integers(0, seeds, (n, seeds))].mean(axis=1)
            drawn = rng.integers(0, tasks, (n, tasks))
            sums = np.take_along_axis(np.broadcast_to(of_seeds * counts, (n, tasks)), drawn, axis=1).sum(axis=1)
            means.append(sums / counts[drawn].sum(axis=1))
        low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(low), float(high))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The mean difference between two sides over tasks. `p` comes from a two-sided sign-flip test."""

    difference: float
    interval: Interval
    p: float
    tasks: int


def compare(values: Sequence[float], others: Sequence[float], seed: int = SEED) -> Comparison:
    """Compare `values` with `others`, paired by task: both are in the same order.

    Tasks are resampled, not rollouts, because the rollouts of one task are alike.
    """
    differences = np.asarray(values, dtype=float) - np.asarray(others, dtype=float)
    of_tasks = differences.tolist()
    return Comparison(
        mean_and_spread(of_tasks)[0], bootstrap_mean(of_tasks, seed), sign_flip_p(of_tasks, seed), len(of_tasks)
    )


def sign_flip_p(differences: Sequence[float], seed: int = SEED) -> float:
    """Return the share of sign patterns with a mean at least as far from 0 as the given one (Fisher's test).

    With few tasks, all sign patterns are tried, otherwise random ones and the given one.
    """
    given = np.sort(np.asarray(differences, dtype=float))
    seen = abs(given.sum()) - 1e-9  # the same numbers in another order may sum to a little less
    if len(given) <= EXACT_UP_TO:
        patterns = itertools.product((-1.0, 1.0), repeat=len(given))
        return float(np.mean([abs(np.dot(signs, given)) >= seen for signs in patterns]))
    rng = np.random.default_rng(seed)
    drawn = [abs(np.dot(rng.choice((-1.0, 1.0), len(given)), given)) >= seen for _ in range(RESAMPLES)]
    return float(np.mean([True, *drawn]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence in one metric's pairs. Its two e-values are those after the last pair.

    `mean`: of the differences; None if there are no pairs. `e_drop`: against "no drop". `e_safe`: against "a drop of
    the margin or more". `worse_at`, `safe_at`: the number of pairs after which each verdict was first reached.
    """

    margin: float
    pairs: int
    mean: float | None
    e_drop: float
    e_safe: float
    worse_at: int | None
    safe_at: int | None

    @property
    def verdict(self) -> Verdict:
        """The verdict that was reached first, or `worse` if both were reached with the same pair."""
        if self.worse_at is not None and (self.safe_at is None or self.worse_at <= self.safe_at):
            return "worse"
        return "undecided" if self.safe_at is None else "safe"


def evidence_of(differences: Iterable[float], margin: float, level: float, metrics: int = 1) -> Evidence:
    """Return the evidence that pairs give in this order. Raises ValueError if a pair or an argument is out of range.

    Each pair is one difference: the candidate minus the live version, scaled by the metric's range; positive is better.
    Against a hypothesis "the mean is at most m" a bettor starts with the wealth 1 and bets a share c of it on each
    pair; a pair d multiplies the wealth by

        1 + c * ((1 + d) / (1 + m) - 1)        with 0 < c < 1

    which is positive, and at most 1 on average while the hypothesis holds. The wealth is then a test
    supermartingale, and so is the mean over several bettors. By Ville's inequality it ever reaches 1 / level with a
    chance of at most `level`, however often one looks. These are the bets of Waudby-Smith and Ramdas, "Estimating means
    of bounded random variables by betting", JRSS B 86 (2024), doi 10.1093/jrsssb/qkad009, with a fixed mixture in
    place of one bettor who learns what to bet. Written with lambda = c / (1 + m), the factor is 1 + lambda * (d - m).

    The test is exact if each difference, given the earlier ones, has a mean on the hypothesis' side. So siblings of one
    task are one pair: `difference` compares their means. And pairs are taken in the order in which they began: in order
    of ending, a candidate that fails slowly would look too good.

    `margin`: the drop, as a share of the metric's range, that must not go live. `level`: the greatest chance that an
    equal candidate is called worse, and that one with a drop of `margin` or more is called safe. With several
    `metrics`, each gets its share of `level` to call a candidate worse, because one is enough for that. To call it
    safe, each gets the full `level`, because all of them must agree (an intersection-union test).
    """
    if not 0 < margin < 1 or not 0 < level < 1 or metrics < 1:
        raise ValueError(f"margin and level must be in (0, 1), metrics at least 1; got {margin}, {level}, {metrics}")
    given = _checked(differences)
    drop, safe = (
        _log_mean(np.cumsum(np.vstack((np.zeros_like(SHARES), _gains(side, at_most))), axis=0))
        for side, at_most in ((-given, 0.0), (given, -margin))
    )
    return Evidence(
        margin=margin,
        pairs=len(given),
        mean=sum(given.tolist()) / len(given) if len(given) else None,
        e_drop=math.exp(min(drop[-1], MOST_LOG)),
        e_safe=math.exp(min(safe[-1], MOST_LOG)),
        worse_at=next(iter(np.flatnonzero(drop >= math.log(metrics / level)).tolist()), None),
        safe_at=next(iter(np.flatnonzero(safe >= math.log(1 / level)).tolist()), None),
    )


def interval(differences: Iterable[float], level: float = 0.05, metrics: int = 1) -> Interval | None:
    """Return the range of means that the pairs do not exclude yet; None if there are no pairs.

    A confidence sequence: however often one looks, the true mean is ever below `low` with probability at most `level`,
    and ever above `high` with at most `level / metrics`. It uses the same bets as the verdict: e_safe exceeds its
    threshold when `low` is above -margin, and e_drop when `high` is below 0.
    """
    given = _checked(differences)
    return Interval(_low(given, 1 / level), -_low(-given, metrics / level)) if len(given) else None


def difference(candidate: Sequence[float], live: Sequence[float], low: float, high: float) -> float:
    """Return how far the candidate's siblings are above the live version's: one pair, in [-1, 1].

    This is the candidate's mean minus the live version's, divided by the width of the range `low` to `high`. Values
    outside it are clipped. Raises ValueError if a side has no values or the range is empty.
    """
    half = high / 2 - low / 2  # halves, so that no range is too large for a float
    if not candidate or not live or not half > 0:
        raise ValueError(f"cannot compare {len(candidate)} with {len(live)} values in the range {low} to {high}")
    ours, theirs = (float(np.mean((np.clip(side, low, high) / 2 - low / 2) / half)) for side in (candidate, live))
    return min(max(ours - theirs, -1.0), 1.0)


def sign_difference(candidate: Sequence[float], live: Sequence[float]) -> float:
    """Return how much more often the candidate's value is higher than lower: one pair, in [-1, 1].

    It compares each value of one side with each of the other. It is for metrics without bounds (latency, length). If
    lower is better, swap the sides. Raises ValueError if a side has no values.
    """
    if not candidate or not live:
        raise ValueError(f"cannot compare {len(candidate)} with {len(live)} values")
    return float(np.mean(np.sign(np.subtract.outer(candidate, live))))


def _checked(differences: Iterable[float]) -> Floats:
    given = np.fromiter(differences, dtype=float)
    if not np.all(np.abs(given) <= 1):  # NaN too
        raise ValueError("each difference must be between -1 and 1")
    return given


def _gains(differences: Floats, at_most: float) -> Floats:
    """Return the log factors of each pair, against "the mean is at most `at_most`". Shape: (pairs, bettors)."""
    return np.log1p(np.outer((1 + differences) / (1 + at_most) - 1, SHARES))


def _log_mean(logs: Floats) -> Floats:
    """Return the logarithm of the mean of exp(logs) over the last axis."""
    return np.asarray(np.logaddexp.reduce(logs, axis=-1) - math.log(len(SHARES)))


def _low(differences: Floats, threshold: float) -> float:
    """Return the highest mean that is excluded, or -1 if none is. All means below it are excluded, too."""
    excluded, possible = -1.0, 1.0
    for _ in range(HALVINGS):
        bound = (excluded + possible) / 2
        if _log_mean(_gains(differences, bound).sum(axis=0)) >= math.log(threshold):
            excluded = bound
        else:
            possible = bound
    return excluded
