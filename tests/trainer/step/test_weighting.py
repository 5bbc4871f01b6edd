"""Each named method by hand, and what a token weighs in a step: by the loss, or by `trainer.weighting`."""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Any

import pytest
import torch

from lightning_proxy.trainer.step.losses import Answers, kl_penalty, loss_inputs, policy_loss, token_weights
from support.sampled_row import row
from support.sections import TrainerConfig


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


@pytest.mark.parametrize(
    ("loss_type", "settings", "expected"),
    # Rollout a has tokens of the ratios 1.5 and 0.5 and the advantage 1, rollout b one of the ratio 3 and -1.
    [
        ("grpo", {}, ((-1.3 - 0.5) / 2 + 2) / 2),  # at A = -1 the ratio is cut by importance_cap
        ("grpo", {"importance_cap": None}, ((-1.3 - 0.5) / 2 + 3) / 2),
        ("grpo", {"importance_cap": None, "clip_high": 0.2}, ((-1.2 - 0.5) / 2 + 3) / 2),
        ("dapo", {"importance_cap": None}, (-1.3 - 0.5 + 3) / 3),
        ("bnpo", {"importance_cap": None}, (-1.3 - 0.5 + 3) / 3),
        ("dr_grpo", {"importance_cap": None}, (-1.3 - 0.5 + 3) / 2 / 64),
        ("luspo", {"importance_cap": None, "importance_level": "sequence"}, (-2 * sqrt(0.75) + 3) / 2),
        ("cispo", {}, (-(1.5 * (log(1.5) - 1) + 0.5 * (log(0.5) - 1)) / 2 + 2 * (log(3) - 1)) / 2),
        ("cispo", {"weighting": "token"}, (-1.5 * (log(1.5) - 1) - 0.5 * (log(0.5) - 1) + 2 * (log(3) - 1)) / 3),
        ("sapo", {}, (-4 * (sigmoid(0.5) + sigmoid(-0.5)) / 2 + 4 / 1.05 * sigmoid(1.05 * 2)) / 2),
        ("vespo", {}, (-(0.75**2 * exp(3 * 0.25)) * (log(0.75) - 2) / 2 + 3**3 * exp(-4) * (log(3) - 1)) / 2),
    ],
)
def test_the_loss_of_each_method_by_hand(loss_type: str, settings: dict[str, Any], expected: float) -> None:
    config = TrainerConfig.model_validate({"loss_type": loss_type, "max_sample_tokens": 64, **settings})
    samples = [row("a", "t", ([1], [2, 3], [-1.0, -1.0], 1.0)), row("b", "t", ([1], [2], [-1.0], -1.0))]
    answers = Answers.of(samples, torch.device("cpu"))
    logprobs = torch.tensor([[log(1.5) - 1, log(0.5) - 1], [log(3) - 1, 0.0]])
    given = loss_inputs(samples, answers, logprobs, token_weights(samples, config), config)
    assert float(policy_loss(given)) == pytest.approx(expected)


@pytest.mark.parametrize(("estimator", "expected"), [("k3", exp(-1) - 1 + 1), ("k2", 2 * 0.5)])
def test_the_kl_of_a_token_by_hand(estimator: str, expected: float) -> None:
    """It is a nat likelier than under the base model, and e^1 times as likely as when it was sampled: cut at 2."""
    config = TrainerConfig.model_validate({"kl_estimator": estimator})
    samples = [row("a", "t", ([1], [2], [-2.0], 1.0))]
    answers = Answers.of(samples, torch.device("cpu"))
    given = loss_inputs(samples, answers, torch.tensor([[-1.0]]), token_weights(samples, config), config)
    assert float(kl_penalty(given, torch.tensor([[-2.0]]))) == pytest.approx(expected)
