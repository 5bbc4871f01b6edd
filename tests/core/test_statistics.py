"""How sure a mean is, by hand; how often the evidence is wrong and how soon it is right, by simulation and by hand."""

import math
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_proxy.core import statistics
from lightning_proxy.core.statistics import Evidence, difference, evidence_of, sign_difference, sign_flip_p

MARGIN, LEVEL, LOOKS = 0.1, 0.05, 1000

Floats = NDArray[np.float64]
Pairs = Callable[[np.random.Generator, int, float], Floats]


def test_the_interval_is_the_quantiles_of_resampled_means() -> None:
    """Of 20 tasks half are solved: a resampled mean is a binomial share, within 6 and 14 of 20 in 95.9 % of cases."""
    found = statistics.bootstrap_mean([0.0, 1.0] * 10, seed=0)
    assert (found.low, found.high) == (pytest.approx(0.3), pytest.approx(0.7))


def solved(chance: float) -> Pairs:
    """Pairs of single rollouts that are solved or not."""

    def draw(rng: np.random.Generator, pairs: int, drop: float) -> Floats:
        return (rng.random(pairs) < chance - drop) * 1.0 - (rng.random(pairs) < chance)

    return draw


def lopsided(rng: np.random.Generator, pairs: int, drop: float) -> Floats:
    """Nearly always a little better, seldom much worse: 0 on average."""
    return np.where(rng.random(pairs) < 0.05, -0.855, 0.045) - drop


def looked_at(pairs: Pairs, drop: float = 0.0, comparisons: int = 200, looks: int = LOOKS) -> list[Evidence]:
    """The evidence of many comparisons, each looked at after every pair."""
    rng = np.random.default_rng(1)
    return [evidence_of(pairs(rng, looks, drop), MARGIN, LEVEL) for _ in range(comparisons)]


@pytest.mark.parametrize("pairs", [solved(0.2), lopsided])
def test_equal_candidates_are_worse_and_drops_of_the_margin_safe_at_most_as_often_as_allowed(pairs: Pairs) -> None:
    assert fmean(evidence.worse_at is not None for evidence in looked_at(pairs)) <= LEVEL
    assert fmean(evidence.safe_at is not None for evidence in looked_at(pairs, MARGIN)) <= LEVEL


def test_drops_and_equal_candidates_are_found_in_a_few_hundred_pairs() -> None:
    def found(drop: float) -> tuple[float, float]:
        """In the middle: after how many pairs it is worse, and safe."""
        seen = looked_at(solved(0.5), drop, 100, 2000)
        return median(one.worse_at or math.inf for one in seen), median(one.safe_at or math.inf for one in seen)

    (large, _), (small, _), (_, equal), (_, better) = map(found, (0.2, 0.1, 0.0, -0.1))
    assert 60 < large < 100 and 60 < better < 100
    assert 250 < small < 425 and 250 < equal < 425


def test_the_e_values_are_the_mean_wealth_of_the_bettors() -> None:
    evidence = evidence_of([-0.5, 0.25], margin=0.2, level=LEVEL)
    assert evidence.e_drop == pytest.approx(np.mean((1 + 0.5 * statistics.SHARES) * (1 - 0.25 * statistics.SHARES)))
    bets = statistics.SHARES / (1 - 0.2)
    assert evidence.e_safe == pytest.approx(np.mean((1 + bets * (-0.5 + 0.2)) * (1 + bets * (0.25 + 0.2))))
    assert (evidence.pairs, evidence.mean, evidence.verdict) == (2, -0.125, "undecided")


def test_the_verdict_that_was_reached_first_stays() -> None:
    assert evidence_of([-1.0] * 100_000, MARGIN, LEVEL).verdict == "worse", "nothing overflows"
    first = evidence_of([-1.0] * 20, MARGIN, LEVEL).worse_at
    evidence = evidence_of([-1.0] * 20 + [1.0] * 200, MARGIN, LEVEL)
    assert (evidence.verdict, evidence.worse_at) == ("worse", first)
    assert evidence.safe_at is not None and evidence.e_drop < 1 / LEVEL < evidence.e_safe


def test_of_several_metrics_one_needs_more_to_be_worse_and_as_much_to_be_safe() -> None:
    alone, shared = (evidence_of([-1.0] * 8, MARGIN, LEVEL, metrics) for metrics in (1, 3))
    assert 1 / LEVEL <= alone.e_drop == shared.e_drop < 3 / LEVEL
    assert (alone.verdict, shared.verdict) == ("worse", "undecided")
    alone, shared = (evidence_of([0.5] * 100, MARGIN, LEVEL, metrics) for metrics in (1, 3))
    assert alone.safe_at == shared.safe_at is not None


def test_siblings_are_one_difference_of_two_means_by_the_range() -> None:
    assert difference([1.0, 0.0, 1.0, 1.0], [0.0, 1.0], 0.0, 1.0) == 0.25
    assert difference([5.0], [-5.0], -10.0, 10.0) == 0.5
    assert difference([7.0, -3.0], [0.0], 0.0, 1.0) == 0.5  # as 1 and 0
    assert difference([0.1] * 3, [0.1] * 7, 0.0, 0.1) == pytest.approx(0.0)
    assert difference([1.5e308, -1.5e308], [-1.5e308], -1.5e308, 1.5e308) == 0.5
    assert sign_difference([3.0, 900.0], [1.0, 3.0, 5.0]) == (1 + 0 - 1 + 3) / 6, "without bounds, by their order"


def test_the_interval_excludes_what_the_verdict_does() -> None:
    for drop, metrics in ((0.1, 1), (0.1, 3), (0.0, 1)):
        seen = solved(0.5)(np.random.default_rng(3), LOOKS, drop)
        evidence = evidence_of(seen, MARGIN, LEVEL, metrics)
        at: Any = evidence.worse_at if drop else evidence.safe_at
        before, then = (statistics.interval(seen[:pairs], LEVEL, metrics) for pairs in (at - 1, at))
        assert before.high >= 0 > then.high if drop else before.low <= -MARGIN < then.low


def test_the_p_value_counts_patterns_of_signs_that_are_as_far_from_0_or_draws_them_for_many_tasks() -> None:
    assert sign_flip_p([1.0, 1.0, 1.0], 0) == 2 / 8  # all positive, or all negative
    assert sign_flip_p([1.0, 2.0, -3.0], 0) == 1.0  # the sum is 0: none is nearer
    assert sign_flip_p([0.0, 0.0], 0) == 1.0
    assert sign_flip_p([0.1] * 10, 0) == pytest.approx(2 / 1024)  # not undone by rounding
    assert sign_flip_p([1.0] * 40, 0) == pytest.approx(1 / 10_001)  # never 0
    # 16 of 30 positive: |sum| >= 2 has the chance 1 - C(30, 15) / 2^30.
    assert sign_flip_p([1.0] * 16 + [-1.0] * 14, 0) == pytest.approx(1 - math.comb(30, 15) / 2**30, abs=0.02)


def test_a_comparison_is_of_the_same_tasks() -> None:
    """Tasks that differ much, and the second model 0.1 better on each: the difference is certain, the means are not."""
    first = [0.0, 0.2, 0.4, 0.6, 0.8] * 2
    found = statistics.compare([value + 0.1 for value in first], first, seed=0)
    assert (found.difference, found.tasks) == (pytest.approx(0.1), 10)
    assert (found.interval.low, found.interval.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert found.p == pytest.approx(2 / 1024)
