"""What a rollout earned, by its rewards: what no other test works out by hand."""

from __future__ import annotations

from lightning_proxy.core.records import Reward
from lightning_proxy.core.returns import Rules, earned


def test_a_name_of_weight_0_is_a_reward_of_0_an_unknown_one_is_none_and_sums_are_exact() -> None:
    for posted, returned in (
        ([], None),
        ([Reward("r", 1.0, name="other")], None),
        ([Reward("r", 5.0, name="nothing")], 0.0),
        ([Reward("r", 0.1, name) for name in "abcdefghij"], 1.0),
    ):
        assert earned(posted, Rules({"reward": 1.0, "nothing": 0.0})).returned == returned, posted
