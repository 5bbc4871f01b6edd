"""RAE against numbers by hand."""

from __future__ import annotations

import pytest

from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.rewarded import Traffic, advantages, group_advantages, traffic
from support.sections import TrainerConfig

__all__ = ["traffic"]

CONFIG = TrainerConfig.model_validate({"credit": "rae"})


def game(when: float, white: float, black: float) -> Sibling:
    calls = [call(str(j), ("white", "black")[j % 2], started_at=when + j) for j in range(4)]
    return Sibling(calls, RolloutRewards(None, {"2": white, "3": black}))


def test_each_seat_is_compared_with_its_own_earlier_returns() -> None:
    third, first, second = game(20, 1.0, -1.0), game(0, 1.0, -1.0), game(10, -1.0, 1.0)  # a lone one, then others
    found = group_advantages([third, first, second], CONFIG)
    white = 1 - (0.95 - 1) / 1.95
    assert found[0] == pytest.approx([white, -white, white, -white])
    assert found[1] == [0.0] * 4
    assert found[2] == pytest.approx([-2.0, 2.0, -2.0, 2.0])


def test_a_reward_of_the_rollout_itself_is_that_of_every_seat() -> None:
    def shared(when: float, reward: float) -> Sibling:
        return Sibling(game(when, 0.0, 0.0).calls, RolloutRewards(reward))

    assert group_advantages([shared(0, 1.0), shared(9, 0.0)], CONFIG) == [[0.0] * 4, [-1.0] * 4]


def test_a_rollout_in_which_a_seat_decided_nothing_says_nothing_of_it() -> None:
    failed = Sibling([call("0", "white", started_at=5.0, status="error")], RolloutRewards(None, {"0": -9.0}))
    assert group_advantages([game(0, 1.0, -1.0), failed, game(10, 1.0, -1.0)], CONFIG)[2] == [0.0] * 4


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
