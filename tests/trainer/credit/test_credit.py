"""Credit and baselines against numbers worked out by hand."""

from __future__ import annotations

import random
from math import exp, sqrt
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_proxy.core.records import Reward
from lightning_proxy.core.returns import Rules
from lightning_proxy.trainer.credit.strategies import (
    STRATEGIES,
    discounted_returns,
    group_baselines,
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


def advantages(name: str, returns: list[float]) -> list[float]:
    baselines = group_baselines(name, returns)
    assert baselines is not None
    return [baseline.advantage(r) for baseline, r in zip(baselines, returns, strict=True)]


def test_uniform_gives_every_call_the_advantage_of_the_rollouts_own_return() -> None:
    group = [sibling(1.0, 5.0, 0.0, 0.0), sibling(0.0, 7.0)]
    assert group_advantages(group, config()) == [[0.5, 0.5, 0.5], [-0.5]]


def test_uniform_sums_the_rewards_of_calls_where_the_rollout_has_none() -> None:
    assert group_advantages([sibling(None, 1.0, 2.0), sibling(None, 1.0)], config()) == [[1.0, 1.0], [-1.0]]


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


def test_a_discounted_return_is_the_reward_and_a_part_of_the_next_calls_return() -> None:
    made = sibling(4.0, 1.0, 0.0, 2.0)
    # 2 + 4 = 6; 0 + 0.5 * 6 = 3; 1 + 0.5 * 3 = 2.5
    assert discounted_returns(made.calls, made.rewards, 0.5) == [2.5, 3.0, 6.0]


@pytest.mark.parametrize("changed", [{"status": "error"}, {"superseded_by": "c"}])
def test_calls_that_decided_nothing_take_no_time(changed: dict[str, Any]) -> None:
    calls = [call("a"), call("b", **changed), call("c"), call("d", **changed)]
    assert discounted_returns(calls, RolloutRewards(4.0), 0.5) == [2.0, 4.0, 4.0, 4.0]
    assert discounted_returns(calls, RolloutRewards(None, {"b": 1.0}), 0.5) == [0.5, 1.0, 0.0, 0.0]


def test_discounted_compares_calls_with_those_of_the_same_step() -> None:
    group = [sibling(None, 1.0, 0.0), sibling(None, 0.0, 1.0)]
    # Returns at discount 1: [1, 0] and [1, 1].
    assert group_advantages(group, config(credit="discounted")) == [[0.0, -0.5], [0.0, 0.5]]
    # At 0.5: [1, 0] and [0.5, 1].
    assert group_advantages(group, config(credit="discounted", discount=0.5)) == [[0.25, -0.5], [-0.25, 0.5]]


def test_a_rollout_that_is_alone_at_a_step_is_compared_as_at_the_last_one_that_it_shared() -> None:
    group = [sibling(1.0, 0.0), sibling(0.0, 0.0, 0.0, 4.0)]
    # Returns [1] and [4, 4, 4]: the mean of the first step is 2.5.
    assert group_advantages(group, config(credit="discounted")) == [[-1.5], [1.5, 1.5, 1.5]]


def test_steps_are_counted_by_agent() -> None:
    a = Sibling([call("0", "plan"), call("1", "act"), call("2", "act")], RolloutRewards(None, {"1": 1.0, "2": 1.0}))
    b = Sibling([call("0", "plan"), call("1", "plan"), call("2", "act")], RolloutRewards(None, {"1": 3.0, "2": 1.0}))
    # Returns [2, 2, 1] and [4, 4, 1]. plan: 2 | 4, 4; act: 2, 1 | 1.
    assert group_advantages([a, b], config(credit="discounted")) == [[-1.0, 0.5, -0.5], [1.0, 1.0, -0.5]]


def test_each_agent_may_have_a_strategy_of_its_own() -> None:
    def rollout(final: float, first: float, second: float) -> Sibling:
        return Sibling([call("0", "plan"), call("1", "act")], RolloutRewards(final, {"0": first, "1": second}))

    group = [rollout(1.0, 0.0, 0.0), rollout(0.0, 0.0, 3.0)]
    # Uniform: 1 and 0. Discounted, the actor: 1 and 3.
    assert group_advantages(group, config(credit={"act": "discounted"})) == [[0.5, -1.0], [-0.5, 1.0]]
    assert group_advantages(group, config(credit={"*": "discounted"})) == [[-1.0, -1.0], [1.0, 1.0]]


def test_anchor_adds_the_comparison_of_calls_in_the_same_state() -> None:
    group = [sibling(2.0, 0.0, 0.0, prompts="sx"), sibling(0.0, 0.0, 0.0, prompts="ss"), sibling(1.0, 0.0, prompts="y")]
    # Rollouts: 2, 0, 1 around their mean, 1. State s: returns 2 (first rollout), 0 and 0 (second) around 2/3.
    found = group_advantages(group, config(credit="anchor"))
    assert found[0] == pytest.approx([1 + 4 / 3, 1.0])
    assert found[1] == pytest.approx([-1 - 2 / 3, -1 - 2 / 3])
    assert found[2] == [0.0]
    half = group_advantages(group, config(credit="anchor", anchor_weight=0.5))
    assert half[0] == pytest.approx([1 + 2 / 3, 1.0])


def test_anchor_learns_from_steps_of_rollouts_whose_returns_are_equal() -> None:
    group = [sibling(None, 0.0, 1.0, prompts="ab"), sibling(None, 1.0, 0.0, prompts="ab")]
    assert group_advantages(group, config(credit="anchor", discount=0.5)) == [[-0.25, 0.5], [0.25, -0.5]]


def test_anchor_counts_the_rewards_of_calls_in_the_rollouts_return_too() -> None:
    group = [sibling(1.0, 3.0, 0.0, prompts="ab"), sibling(2.0, 0.0, 0.0, prompts="cd")]
    # GiGPO's R is the sum over all steps: 1 + 3 + 0 and 2, around 3. No state comes twice, so A(step) is 0.
    assert group_advantages(group, config(credit="anchor", discount=0.5)) == [[1.0, 1.0], [-1.0, -1.0]]
    both = [sibling(1.0, 3.0, 0.0, prompts="sb"), sibling(2.0, 0.0, 0.0, prompts="sd")]
    # In state s the discounted returns are 3 + 0.5 * 1 and 0.5 * 2, around 2.25; the weight of A(step) is 2.
    found = group_advantages(both, config(credit="anchor", discount=0.5, anchor_weight=2.0))
    assert found == [[1.0 + 2 * 1.25, 1.0], [-1.0 - 2 * 1.25, -1.0]]


def test_a_state_is_the_prompts_tokens_or_else_what_the_request_shows() -> None:
    shown = {"messages": [{"role": "user", "content": "hi"}]}
    assert state_of(call("a", prompt=(1, 2), request=shown)) == state_of(call("b", prompt=(1, 2)))
    assert state_of(call("a", request={**shown, "seed": 1})) == state_of(call("b", request={**shown, "seed": 2}))
    assert state_of(call("a", request=shown)) != state_of(call("b", request={**shown, "tools": []}))


def test_named_rewards_are_summed_by_their_weights_and_the_newest_counts() -> None:
    posted = [
        Reward("r", 9.0), Reward("r", 1.0), Reward("r", 4.0, name="style"), Reward("r", 8.0, name="other"),
        Reward("r", 2.0, "a"), Reward("r", 3.0, "a", name="style"), Reward("r", 5.0, "b", name="other"),
    ]  # fmt: skip
    found = RolloutRewards.counted(posted, Rules({"reward": 1.0, "style": 0.5}))
    assert (found.final, found.calls) == (3.0, {"a": 3.5})
    assert {name: of.returned for name, of in found.named.items()} == {"reward": 1.0, "style": 4.0}
    found = RolloutRewards.counted(posted, Rules({"reward": 1.0}))
    assert (found.final, found.calls) == (1.0, {"a": 2.0})
    assert RolloutRewards.counted(posted[:1], Rules({"style": 1.0})).posted is None


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


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # mean 0.5, sample variance (4 * 0.25) / 3
    expected = 0.5 / (3**-0.5 + 1e-4)
    assert advantages("grpo", [0.0, 1.0, 1.0, 0.0]) == pytest.approx([-expected, expected, expected, -expected])


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert advantages("dr_grpo", [0.0, 1.0, 2.0]) == pytest.approx([-1.0, 0.0, 1.0])


def test_rloo_compares_with_the_others() -> None:
    assert advantages("rloo", [0.0, 1.0, 2.0]) == pytest.approx([-1.5, 0.0, 1.5])


def test_reinforce_pp_normalises_by_mean_and_variance_of_all() -> None:
    # mean 1, variance (1 + 0 + 0 + 1) / 4
    expected = 1 / sqrt(0.5 + 1e-8)
    assert advantages("reinforce_pp", [0.0, 1.0, 1.0, 2.0]) == pytest.approx([-expected, 0.0, 0.0, expected])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
@pytest.mark.parametrize("returns", [[], [1.0], [0.1 + 0.2, 0.3], [0.0] * 8])
def test_groups_that_teach_nothing_have_no_baseline(name: str, returns: list[float]) -> None:
    assert group_baselines(name, returns) is None


@pytest.mark.parametrize("credit", ["uniform", "discounted", "anchor"])
def test_rollouts_that_are_alike_or_alone_have_no_advantages(credit: str) -> None:
    for group in ([sibling(1.0, 0.5, prompts="s")], [sibling(1.0, 0.5, prompts="s")] * 3):
        assert group_advantages(group, config(credit=credit)) == [[0.0]] * len(group)
    assert group_advantages([], config(credit=credit)) == []


def test_an_unknown_baseline_is_named() -> None:
    with pytest.raises(ValidationError, match="grpo"):
        config(baseline="mean")


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
