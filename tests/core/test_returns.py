"""What a rollout earned, by its rewards: as the docstring of `returns.py` works it out, and in any order of names."""

from __future__ import annotations

import pytest

from lightning_proxy.core.records import Reward
from lightning_proxy.core.returns import Rules, earned

RULES = Rules({"reward": 1.0, "style": 0.5})


@pytest.mark.parametrize(
    ("posted", "returned"),
    [
        ([], None),
        ([Reward("r", 1.0, name="other")], None),
        ([Reward("r", 5.0, name="nothing")], 0.0),
        ([Reward("r", 0.1, name) for name in "abcdefghij"], 1.0),  # as if it were summed exactly
    ],
)
def test_a_name_of_weight_0_is_a_reward_of_0_and_an_unknown_one_is_none(
    posted: list[Reward], returned: float | None
) -> None:
    assert earned(posted, Rules({"reward": 1.0, "nothing": 0.0})).returned == returned
