"""GDPO against numbers by hand. `tests/reference/test_advantages.py` has its formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_proxy.core.records import Reward
from lightning_proxy.core.returns import Rules
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.rewarded import Traffic, advantages, group_advantages, traffic
from support.sections import TrainerConfig

__all__ = ["traffic"]

WEIGHTS = {"right": 1.0, "style": 0.5}


def config(**changed: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"credit": "gdpo", "reward_weights": WEIGHTS, **changed})


def sibling(right: float | None, style: float | None, calls: int = 1) -> Sibling:
    named = {"right": right, "style": style}
    posted = [Reward("r", value, name=name) for name, value in named.items() if value is not None]
    return Sibling([call(str(i)) for i in range(calls)], RolloutRewards.counted(posted, Rules(WEIGHTS)))


def test_each_name_is_compared_by_itself() -> None:
    group = [sibling(1.0, 0.0, calls=2), sibling(1.0, 4.0), sibling(0.0, 0.0), sibling(0.0, 4.0)]
    found = group_advantages(group, config())
    assert [own[0] for own in found] == pytest.approx([0.433, 1.299, -1.299, -0.433], abs=1e-3)
    assert found[0][0] == found[0][1]
    assert group_advantages(group, config(baseline="dr_grpo")) == [[-0.5, -0.5], [1.5], [-1.5], [0.5]]


def test_a_name_that_never_differs_or_that_a_sibling_does_not_have_says_nothing_of_it() -> None:
    group = [sibling(1.0, 2.0), sibling(1.0, None), sibling(1.0, 4.0)]
    assert group_advantages(group, config(baseline="dr_grpo")) == [[-0.5], [0.0], [0.5]]


def test_automatic_rewards_are_one_more_name() -> None:
    group = [sibling(1.0, 0.0), sibling(0.0, 0.0)]
    group[0] = replace(group[0], rewards=replace(group[0].rewards, air={"0": -0.2}))
    assert group_advantages(group, config(baseline="dr_grpo")) == [[pytest.approx(0.4)], [pytest.approx(-0.4)]]


def test_agents_may_each_have_their_own_rewards_by_name() -> None:
    def two(first: float, second: float) -> Sibling:
        posted = [Reward("r", first, "0", name="right"), Reward("r", second, "1", name="right")]
        return Sibling([call("0", "plan"), call("1", "act")], RolloutRewards.counted(posted, Rules(WEIGHTS)))

    each = config(baseline="dr_grpo", agents=["plan", "act"], agent_credit="own")
    assert group_advantages([two(1.0, 0.0), two(0.0, 4.0)], each) == [[0.5, -2.0], [-0.5, 2.0]]


async def test_a_step_compares_each_name_of_the_stores_rewards(traffic: Traffic) -> None:
    for name, right, style in (("a", 1.0, 0.0), ("b", 0.0, 4.0)):
        await traffic.rollout(name, "t", right, reward_name="right")
        await traffic.post(Reward(name, style, name="style", final=False))
    # With weights 1 and 0.25 the sums are equal, and comparing these would teach nothing.
    batch = await traffic.batch(credit="gdpo", baseline="grpo", reward_weights={"right": 1.0, "style": 0.25})
    one = 0.5**0.5  # half a distance by the standard deviation of two values
    assert advantages(batch) == pytest.approx({"a-0": 0.75 * one, "b-0": -0.75 * one}, rel=1e-3)
