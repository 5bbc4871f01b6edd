"""Every credit with every baseline, and every loss at every level: finite, or refused."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from lightning_proxy.core.config.trainer import LossType
from lightning_proxy.core.records import Choice, Reward
from lightning_proxy.core.returns import Rules
from lightning_proxy.trainer.step.losses import LossInputs, policy_loss
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.rewarded import group_advantages
from support.sections import TrainerConfig

LOSSES = [*(("loss_type", name) for name in get_args(LossType)), *(("loss", n) for n in TrainerConfig.known("loss"))]
REFUSED = {("vespo", "sequence"), ("luspo", "token"), *((name, "sequence") for name in TrainerConfig.known("loss"))}


def rollout(when: float, *rewards: float) -> Sibling:
    answers = [(Choice(0, (i,) * (i + 1)),) for i in range(len(rewards))]
    calls = [
        call(str(i), "ab"[i % 2], prompt=(i,), started_at=when + i, choices=answer) for i, answer in enumerate(answers)
    ]
    posted = [Reward("r", value, str(i)) for i, value in enumerate(rewards)]
    return Sibling(calls, RolloutRewards.counted(posted, Rules({"reward": 1.0})))


@pytest.mark.parametrize(
    ("credit", "baseline"), [*itertools.product(TrainerConfig.known("credit"), TrainerConfig.known("baseline"))]
)
def test_every_credit_has_finite_advantages_with_every_baseline(credit: str, baseline: str) -> None:
    group = [rollout(0, 1.0, 0.0), rollout(10, 0.0, 3.0, 1.0), rollout(20, 0.0, 0.0)]
    config = TrainerConfig.model_validate({"credit": credit, "baseline": baseline, "judge": {"model": "openai/j"}})
    found = group_advantages(group, config)
    assert [len(own) for own in found] == [2, 3, 2]
    values = torch.tensor([value or 0.0 for own in found for value in own])
    assert values.isfinite().all() and values.any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("key", "loss"), LOSSES)
def test_every_loss_is_refused_at_a_level_or_has_finite_gradients_there(key: str, loss: str, level: str) -> None:
    settings = {key: loss, "importance_level": level}
    if (loss, level) in REFUSED:
        with pytest.raises(ValidationError, match=f"{key} {loss} .*importance_level: "):
            TrainerConfig.model_validate(settings)
        return
    config, chance = TrainerConfig.model_validate(settings), torch.Generator().manual_seed(0)
    logprobs, sampled = (-torch.rand(4, 9, generator=chance) * 3 for _ in range(2))
    ones, advantages = torch.ones(4, 9), torch.randn(4, 1, generator=chance).expand(4, 9)
    policy_loss(LossInputs(logprobs.requires_grad_(), sampled, advantages, ones, config, ones)).backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and logprobs.grad.any()
