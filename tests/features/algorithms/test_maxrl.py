"""MaxRL against numbers by hand."""

from __future__ import annotations

from math import comb
from statistics import fmean

import pytest

from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.credit import group_advantages
from support.sections import TrainerConfig


def advantages(*returns: float) -> list[float]:
    group = [Sibling([call("0")], RolloutRewards(value)) for value in returns]
    config = TrainerConfig.model_validate({"baseline": "maxrl"})
    return [own[0] or 0.0 for own in group_advantages(group, config)]


def test_an_advantage_is_the_distance_from_the_mean_in_means() -> None:
    assert advantages(1.0, 0.0, 0.0, 0.0) == [3.0, -1.0, -1.0, -1.0]
    assert advantages(3.0, 1.0) == [0.5, -0.5]


@pytest.mark.parametrize("returns", [(0.0, 0.0), (1.0, 1.0), (0.0, -1.0), (1.0, -1.0)])
def test_a_group_without_success_teaches_nothing(returns: tuple[float, ...]) -> None:
    assert not any(advantages(*returns))


@pytest.mark.parametrize("success", [0.1, 0.5])
def test_the_expected_gradient_is_that_of_the_log_of_the_success_rate_up_to_order_n_minus_1(success: float) -> None:
    """One decision with success rate p: d log(probability)/dp is 1/p for a success, -1/(1 - p) for a failure."""
    n, found = 8, 0.0
    for k in range(1, n):
        of_each = advantages(*[1.0] * k, *[0.0] * (n - k))
        slope = fmean([of_each[0] / success] * k + [-of_each[-1] / (1 - success)] * (n - k))
        found += comb(n, k) * success**k * (1 - success) ** (n - k) * slope
    assert found == pytest.approx(sum((1 - success) ** k for k in range(n - 1)))
