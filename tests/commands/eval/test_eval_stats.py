"""The statistics of `eval`, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from lightning_proxy.commands.eval.stats import compare, ks, pass_at_k, sign_flip_p


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the one that passed
        (5, 2, 3, 9 / 10),  # of the 10 triples only that of the three others has none
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (4, 4, 1, 1.0),
    ],
)
def test_pass_at_k_is_the_chance_that_one_of_k_drawn_has_passed(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_is_shown_for_powers_of_two_and_all_samples() -> None:
    assert (ks(1), ks(4), ks(6), ks(0)) == ([1], [1, 2, 4], [1, 2, 4, 6], [])


def test_the_p_value_counts_the_patterns_of_signs_that_are_as_far_from_0() -> None:
    assert sign_flip_p([1.0, 1.0, 1.0], 0) == 2 / 8  # all positive, or all negative
    assert sign_flip_p([1.0, 2.0, -3.0], 0) == 1.0  # the sum is 0: none is nearer
    assert sign_flip_p([0.0, 0.0], 0) == 1.0
    assert sign_flip_p([0.1] * 10, 0) == pytest.approx(2 / 1024)  # not undone by rounding


def test_the_p_value_of_many_tasks_is_drawn_at_random_and_never_0() -> None:
    assert sign_flip_p([1.0] * 40, 0) == pytest.approx(1 / 10_001)
    # 16 of 30 positive: |sum| >= 2 has the chance 1 - C(30, 15) / 2^30.
    assert sign_flip_p([1.0] * 16 + [-1.0] * 14, 0) == pytest.approx(1 - math.comb(30, 15) / 2**30, abs=0.02)


def test_a_comparison_is_of_the_same_tasks() -> None:
    """Tasks that differ much, and the second model 0.1 better on each: the difference is certain, the means are not."""
    first = [0.0, 0.2, 0.4, 0.6, 0.8] * 2
    found = compare([value + 0.1 for value in first], first, seed=0)
    assert (found.difference, found.tasks) == (pytest.approx(0.1), 10)
    assert (found.interval.low, found.interval.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert found.p == pytest.approx(2 / 1024)
