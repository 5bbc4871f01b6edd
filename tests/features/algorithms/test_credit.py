"""GDPO and RAE by hand, and in steps. `tests/reference/test_advantages.py` has their formulas, and MaxRL's."""

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


def gdpo(group: list[Sibling], **changed: Any) -> list[list[float | None]]:
    settings = {"credit": "gdpo", "reward_weights": WEIGHTS, **changed}
    return group_advantages(group, TrainerConfig.model_validate(settings))


def sibling(*posted: Reward) -> Sibling:
    calls = [call("0", "plan"), call("1", "act")]
    return Sibling(calls, RolloutRewards.counted(posted, Rules(WEIGHTS)))


def test_each_name_is_compared_by_itself() -> None:
    named = [(1.0, 0.0), (1.0, 4.0), (0.0, 0.0), (0.0, 4.0)]
    group = [sibling(Reward("r", right, name="right"), Reward("r", style, name="style")) for right, style in named]
    expected = [[value] * 2 for value in (0.433, 1.299, -1.299, -0.433)]
    assert gdpo(group) == [pytest.approx(own, abs=1e-3) for own in expected]


def test_automatic_rewards_are_one_more_name() -> None:
    first, second = (sibling(Reward("r", value, name="right")) for value in (1.0, 0.0))
    first = replace(first, rewards=replace(first.rewards, air={"0": -0.2}))
    assert gdpo([first, second], baseline="dr_grpo") == [pytest.approx([0.4] * 2), pytest.approx([-0.4] * 2)]


def test_agents_may_each_have_their_own_rewards_by_name() -> None:
    rewards = [((1.0, "0"), (0.0, "1")), ((0.0, "0"), (4.0, "1"))]
    group = [sibling(*(Reward("r", value, call_id, name="right") for value, call_id in own)) for own in rewards]
    found = gdpo(group, baseline="dr_grpo", agents=["plan", "act"], agent_credit="own")
    assert found == [[0.5, -2.0], [-0.5, 2.0]]


async def test_a_step_compares_each_name_of_the_stores_rewards(traffic: Traffic) -> None:
    for name, right, style in (("a", 1.0, 0.0), ("b", 0.0, 4.0)):
        await traffic.rollout(name, "t", right, reward_name="right")
        await traffic.post(Reward(name, style, name="style", final=False))
    # With weights 1 and 0.25 the sums are equal, and comparing these would teach nothing.
    batch = await traffic.batch(credit="gdpo", baseline="grpo", reward_weights={"right": 1.0, "style": 0.25})
    one = 0.5**0.5  # half a distance by the standard deviation of two values
    assert advantages(batch) == pytest.approx({"a-0": 0.75 * one, "b-0": -0.75 * one}, rel=1e-3)


def test_each_seat_is_compared_with_its_own_returns_in_the_order_of_the_games() -> None:
    def game(when: float, white: float, black: float) -> Sibling:
        calls = [call(str(j), ("white", "black")[j % 2], started_at=when + j) for j in range(4)]
        return Sibling(calls, RolloutRewards(None, {"2": white, "3": black}))

    third, first, second = game(20, 1.0, -1.0), game(0, 1.0, -1.0), game(10, -1.0, 1.0)  # a lone one, then others
    found = group_advantages([third, first, second], TrainerConfig.model_validate({"credit": "rae"}))
    white = 1 - (0.95 - 1) / 1.95
    assert found == [pytest.approx([white, -white] * 2), [0.0] * 4, pytest.approx([-2.0, 2.0] * 2)]


async def test_a_step_compares_rollouts_without_a_task_with_earlier_ones_of_the_store(traffic: Traffic) -> None:
    for i in range(4):
        await traffic.rollout(f"before-{i}", None, float(i))
    await traffic.rollout("new", None, 4.0)
    batch = await traffic.batch(credit="rae", lone_rollouts="running", group_size=5)
    weights = [0.95**age for age in (3, 2, 1, 0)]
    mean = sum(weight * value for weight, value in zip(weights, range(4), strict=True)) / sum(weights)
    assert advantages(batch) == pytest.approx({"new-0": 4.0 - mean})


async def test_where_a_step_is_compared_it_has_one_running_mean(traffic: Traffic) -> None:
    for i, (task, reward) in enumerate((("a", 0.0), ("b", 1.0), ("a", 2.0), ("b", 1.0))):
        await traffic.rollout(f"r{i}", task, reward)
    batch = await traffic.batch(credit="rae", compare="step", tasks_per_step=2)
    third, fourth = 2 - 1 / 1.95, 1 - (0.95 * 1 + 2) / (0.95**2 + 0.95 + 1)
    assert advantages(batch) == pytest.approx({"r0-0": 0.0, "r1-0": 1.0, "r2-0": third, "r3-0": fourth})
