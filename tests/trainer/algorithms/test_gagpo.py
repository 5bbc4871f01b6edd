"""GAGPO against numbers by hand, and beside a float64 loop."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from lightning_proxy.trainer.step.losses import policy_loss
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.credit import group_advantages
from support.sections import TrainerConfig


def config(**changed: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"credit": "gagpo", **changed})


def rollout(prompts: str, final: float, calls: dict[str, float] | None = None) -> Sibling:
    made = [call(str(j), prompt=(ord(prompt),)) for j, prompt in enumerate(prompts)]
    return Sibling(made, RolloutRewards(final, calls or {}))


def flat(group: list[Sibling], settings: TrainerConfig) -> list[float | None]:
    return [*chain(*group_advantages(group, settings))]


def test_an_example_worked_by_hand() -> None:
    group = [rollout("ab", 1.0), rollout("ab", 0.0), rollout("ac", 0.0)]
    raw = [1 / 6 + 0.95 / 2, 1 / 2, 1 / 6 - 0.95 / 2, -1 / 2, -1 / 3, 0.0]
    assert flat(group, config(baseline="dr_grpo")) == pytest.approx(raw)
    assert flat(group, config()) == pytest.approx([1.357, 1.057, -0.652, -1.057, -0.705, 0.0], abs=1e-3)


def of_definition(rollouts: list[list[tuple[int, float]]], discount: float, decay: float) -> torch.Tensor:
    """The normalised advantages of (prompt, reward), as sums of all later TD errors, in float64."""
    after: dict[int, list[float]] = {}
    for steps in rollouts:
        for t, (prompt, _) in enumerate(steps):
            after.setdefault(prompt, []).append(sum(discount**k * r for k, (_, r) in enumerate(steps[t:])))
    value = {prompt: sum(of) / len(of) for prompt, of in after.items()}
    found = []
    for steps in rollouts:
        values = [*(value[prompt] for prompt, _ in steps), 0.0]
        errors = [r + discount * values[t + 1] - values[t] for t, (_, r) in enumerate(steps)]
        found += [sum((discount * decay) ** k * e for k, e in enumerate(errors[t:])) for t in range(len(steps))]
    raw = torch.tensor(found, dtype=torch.float64)
    return (raw - raw.mean()) / (raw.std() + 1e-4)


def test_its_gradient_is_that_of_a_loop() -> None:
    chance = random.Random(1)
    rollouts = [
        [(chance.randrange(4), chance.random() * (chance.random() < 0.5)) for _ in range(chance.randint(1, 9))]
        for _ in range(6)
    ]
    group = [
        rollout("".join(chr(97 + prompt) for prompt, _ in steps), 0.0, {str(t): r for t, (_, r) in enumerate(steps)})
        for steps in rollouts
    ]
    settings = config(discount=0.9)
    advantages = torch.tensor(flat(group, settings), dtype=torch.float64)[:, None]
    logprobs = torch.full_like(advantages, -1.0).requires_grad_()
    ones = torch.ones_like(advantages)
    inputs = {"completion_mask": ones, "token_weights": ones, "old_per_token_logps": logprobs.detach()}
    policy_loss(logprobs, {**inputs, "advantages": advantages}, settings).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad[:, 0], -of_definition(rollouts, 0.9, 0.95), rtol=1e-10, atol=1e-12)


def test_where_no_prompt_recurs_only_first_calls_learn() -> None:
    found = group_advantages([rollout("abc", 1.0), rollout("ade", 0.0)], config(baseline="dr_grpo"))
    assert found == [[pytest.approx(0.5), 0.0, 0.0], [pytest.approx(-0.5), 0.0, 0.0]]


def test_a_call_without_an_answer_is_no_step() -> None:
    failed = rollout("abb", 1.0)
    failed = Sibling([failed.calls[0], call("1", status="error"), failed.calls[2]], failed.rewards)
    both = [[failed, rollout("ab", 0.0)], [rollout("ab", 1.0), rollout("ab", 0.0)]]
    (with_it, other), without = (group_advantages(group, config(discount=0.5)) for group in both)
    assert [with_it[0], 0.0, with_it[2]] == pytest.approx([without[0][0], 0.0, without[0][1]])
    assert with_it[1] == 0.0 and other == without[1]


def test_the_same_prompt_of_another_agent_is_another_one() -> None:
    def two(first: str, second: str, reward: float) -> Sibling:
        return Sibling([call("0", first, (1,)), call("1", second, (1,))], RolloutRewards(reward))

    found = group_advantages([two("a", "b", 1.0), two("a", "b", 0.0), two("c", "b", 0.0)], config(baseline="dr_grpo"))
    assert found[2][0] == pytest.approx(1 / 3 - 0.95 / 3)


def test_equal_rewards_teach_nothing() -> None:
    assert group_advantages([rollout("ab", 0.7), rollout("acc", 0.7)], config()) == [[0.0] * 2, [0.0] * 3]


@pytest.mark.parametrize("credit", ["gagpo", {"planner": "gagpo", "*": "uniform"}])
def test_a_baseline_that_divides_by_the_mean_is_refused(credit: str | dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="credit gagpo compares differences") as refused:
        config(credit=credit, baseline="maxrl")
    assert "\n" not in refused.value.errors()[0]["msg"]
