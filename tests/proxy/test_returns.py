"""What a rollout earned, by its rewards: as the docstring of `returns.py` works it out, and in any order of names."""

from __future__ import annotations

import pytest

from lightning_proxy.proxy.returns import Rules, earned
from lightning_proxy.proxy.types import Reward

RULES = Rules({"reward": 1.0, "style": 0.5})


def test_the_newest_of_each_name_counts_by_its_weight_and_the_rollouts_own_comes_first() -> None:
    posted = [Reward("r", 1.0, "a"), Reward("r", 0.0, "a"), Reward("r", 1.0, "a", "style"), Reward("r", 1.0, "b")]
    found = earned(posted, RULES)
    assert (found.own, found.calls, found.returned) == (None, {"a": 0.5, "b": 1.0}, 1.5)
    assert earned([*posted, Reward("r", 3.0)], RULES).returned == 3.0
    assert earned([*posted, Reward("r", 3.0, name="other")], RULES).returned == 1.5


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


def test_a_failed_rollout_without_a_reward_of_its_own_has_the_one_for_failures() -> None:
    zero = RULES._replace(failed=-1.0)
    assert earned([], zero).returned is None
    assert earned([Reward("r", 1.0, "a")], zero, "failed").returned == -1.0
    assert earned([Reward("r", 2.0)], zero, "failed").returned == 2.0
    assert earned([Reward("r", 1.0, "a")], RULES, "failed").returned == 1.0
