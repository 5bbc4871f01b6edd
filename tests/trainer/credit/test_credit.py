"""Credit and baselines against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.core.records import Reward
from lightning_proxy.core.returns import Rules
from lightning_proxy.trainer.credit.strategies import STRATEGIES, discounted_returns, state_of
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.rewarded import group_advantages, group_returns
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


@pytest.mark.parametrize("changed", [{"status": "error"}, {"superseded_by": "c"}])
def test_calls_that_decided_nothing_take_no_time(changed: dict[str, Any]) -> None:
    calls = [call("a"), call("b", **changed), call("c"), call("d", **changed)]
    assert discounted_returns(calls, RolloutRewards(4.0), 0.5) == [2.0, 4.0, 4.0, 4.0]
    assert discounted_returns(calls, RolloutRewards(None, {"b": 1.0}), 0.5) == [0.5, 1.0, 0.0, 0.0]


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
