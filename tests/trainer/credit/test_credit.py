"""Credit and baselines against numbers worked out by hand."""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_proxy.core.records import Reward
from lightning_proxy.core.returns import Rules
from lightning_proxy.trainer.credit.strategies import (
    STRATEGIES,
    discounted_returns,
    state_of,
)
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.credit import group_advantages, group_returns
from support.sections import TrainerConfig


def sibling(final: float | None, *rewards: float, prompts: str = "") -> Sibling:
    """A rollout with one call a reward; `prompts` has one letter a call, its state."""
    calls = [call(str(i), prompt=(ord(prompts[i]),) if prompts else ()) for i in range(len(rewards))]
    return Sibling(calls, RolloutRewards(final, {str(i): r for i, r in enumerate(rewards)}))


def config(**changed: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"baseline": "dr_grpo", **changed})


@pytest.mark.parametrize(
    ("credit", "returns"),
    [("uniform", [[4.0, 4.0], [1.0]])] + [(name, [[3.0, 4.0], [1.0]]) for name in STRATEGIES if name != "uniform"],
)
def test_the_return_of_a_call_is_what_its_strategy_compares(credit: str, returns: list[list[float]]) -> None:
    group = [sibling(4.0, 1.0, 0.0), sibling(1.0, 0.0)]
    assert group_returns(group, config(credit=credit, discount=0.5, judge={"model": "openai/j"})) == returns


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValidationError, match="uniform"):
        config(credit="best")


@pytest.mark.parametrize("changed", [{"status": "error"}, {"superseded_by": "c"}])
def test_calls_that_decided_nothing_take_no_time(changed: dict[str, Any]) -> None:
    calls = [call("a"), call("b", **changed), call("c"), call("d", **changed)]
    assert discounted_returns(calls, RolloutRewards(4.0), 0.5) == [2.0, 4.0, 4.0, 4.0]
    assert discounted_returns(calls, RolloutRewards(None, {"b": 1.0}), 0.5) == [0.5, 1.0, 0.0, 0.0]


def test_each_agent_may_have_a_strategy_of_its_own() -> None:
    def rollout(final: float, first: float, second: float) -> Sibling:
        return Sibling([call("0", "plan"), call("1", "act")], RolloutRewards(final, {"0": first, "1": second}))

    group = [rollout(1.0, 0.0, 0.0), rollout(0.0, 0.0, 3.0)]
    # Uniform: 1 and 0. Discounted, the actor: 1 and 3.
    assert group_advantages(group, config(credit={"act": "discounted"})) == [[0.5, -1.0], [-0.5, 1.0]]
    assert group_advantages(group, config(credit={"*": "discounted"})) == [[-1.0, -1.0], [1.0, 1.0]]


def test_a_state_is_the_prompts_tokens_or_else_what_the_request_shows() -> None:
    shown = {"messages": [{"role": "user", "content": "hi"}]}
    assert state_of(call("a", prompt=(1, 2), request=shown)) == state_of(call("b", prompt=(1, 2)))
    assert state_of(call("a", request={**shown, "seed": 1})) == state_of(call("b", request={**shown, "seed": 2}))
    assert state_of(call("a", request=shown)) != state_of(call("b", request={**shown, "tools": []}))


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_rewards_that_are_as_large_as_numbers_can_be_are_compared_too(baseline: str) -> None:
    posted = [[Reward("r", value), Reward("r", value, name="style")] for value in (1.7e308, -1.7e308, -1.7e308)]
    rewards = [RolloutRewards.counted(own, Rules({"reward": 1.0, "style": 10.0})) for own in posted]
    found = group_advantages([Sibling([call("0")], own) for own in rewards], config(baseline=baseline))
    assert all(0 < abs(advantage or 0) < 1e31 for (advantage,) in found)


def test_automatic_rewards_are_added_to_what_was_posted() -> None:
    both = RolloutRewards(1.0, {"0": 2.0}, {"0": -0.25, "1": -0.5})
    assert (both.posted, both.total, both.of_call("0"), both.of_call("1")) == (1.0, 0.25, 1.75, -0.5)
    assert RolloutRewards(None, {"0": 2.0}, {"0": -0.25}).total == 1.75


@pytest.mark.parametrize("credit", ["uniform", "discounted", "anchor"])
def test_rollouts_that_are_alike_or_alone_have_no_advantages(credit: str) -> None:
    for group in ([sibling(1.0, 0.5, prompts="s")], [sibling(1.0, 0.5, prompts="s")] * 3):
        assert group_advantages(group, config(credit=credit)) == [[0.0]] * len(group)
    assert group_advantages([], config(credit=credit)) == []


def final_probability(credit: str, seed: int) -> float:
    """How likely a policy with one parameter, trained by REINFORCE on 100 groups, is to take its coin at once.

    A rollout has two calls and one coin: taken at the first (1, then 0), or at the second (0, then 1).
    """
    chance, parameter = random.Random(seed), 0.0
    for _ in range(100):
        now = 1 / (1 + exp(-parameter))
        taken = [chance.random() < now for _ in range(8)]
        group = [sibling(None, float(first), float(not first)) for first in taken]
        values = group_advantages(group, config(credit=credit, discount=0.5, baseline="grpo"))
        # The gradient of the log-probability of the first call's action; the second has no choice.
        parameter += 0.1 * sum(own[0] * (first - now) for own, first in zip(values, taken, strict=True))
    return 1 / (1 + exp(-parameter))


@pytest.mark.parametrize("seed", range(5))
def test_rewards_that_depend_on_the_action_are_learned_from_by_discounted_and_not_by_uniform(seed: int) -> None:
    assert final_probability("uniform", seed) == 0.5
    assert final_probability("discounted", seed) > 0.95
