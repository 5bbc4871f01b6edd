"""MaxRL against numbers by hand."""

from __future__ import annotations

import pytest

from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.rewarded import group_advantages
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
