"""How sure a mean is, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_proxy.core.statistics import bootstrap_mean


def test_the_interval_is_the_quantiles_of_resampled_means() -> None:
    """Of 20 tasks half are solved: a resampled mean is a binomial share, within 6 and 14 of 20 in 95.9 % of cases."""
    found = bootstrap_mean([0.0, 1.0] * 10, seed=0)
    assert (found.low, found.high) == (pytest.approx(0.3), pytest.approx(0.7))


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    intervals = [bootstrap_mean(rng.normal(0.3, 1.0, 40).tolist(), seed) for seed in range(100)]
    assert 90 <= sum(i.low <= 0.3 <= i.high for i in intervals) <= 98


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [math.sin(task) for task in range(30)]
    assert bootstrap_mean(values, 3) == bootstrap_mean(values, 3)
    assert bootstrap_mean(values, 3) != bootstrap_mean(values, 4)


def test_equal_values_and_one_alone_have_an_interval_of_no_width() -> None:
    assert bootstrap_mean([0.5] * 3, 0) == bootstrap_mean([0.5], 0)
    assert bootstrap_mean([0.5], 0).low == bootstrap_mean([0.5], 0).high == 0.5
