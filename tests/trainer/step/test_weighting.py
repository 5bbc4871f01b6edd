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


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    # Rollout a has 3 tokens in two rows, b has 6; the loss is the mean over both rollouts.
    [("grpo", (1 / 3, 1 / 6)), ("dapo", (1 / 4.5, 1 / 4.5)), ("dr_grpo", (1 / 64, 1 / 64)), ("luspo", (1.0, 1.0))],
)
def test_what_a_token_weighs(loss_type: str, expected: tuple[float, float]) -> None:
    level = "sequence" if loss_type == "luspo" else "token"
    config = TrainerConfig.model_validate({"loss_type": loss_type, "importance_level": level, "max_sample_tokens": 64})
    samples = [
        row("a", "t", ([1], [2, 3], [-1.0, -1.0], 1.0)),
        row("a", "t", ([4], [5], [-1.0], 1.0)),
        row("b", "t", ([1], [2, 3, 4, 5, 6, 7], [-1.0] * 6, 1.0)),
    ]
    found = token_weights(samples, config)
    assert (2 * found["a"], 2 * found["b"]) == pytest.approx(expected)
    assert token_weights(samples, config, compared=4)["a"] == found["a"] / 2


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [  # the weights of the tokens of a's answers, of 2 and 1 tokens, and of b's one of 6, in a mean over two rollouts
        ("token", (1 / 4.5, 1 / 4.5, 1 / 4.5)),
        ("rollout", (1 / 3, 1 / 3, 1 / 6)),
        ("sequence", (1 / 1.5 / 2, 1 / 1.5, 1 / 1.5 / 6)),
    ],
)
@pytest.mark.parametrize("loss_type", ["cispo", "dapo"])
def test_weighting_takes_the_place_of_the_losss_own(
    loss_type: str, weighting: str, expected: tuple[float, ...]
) -> None:
    config = TrainerConfig.model_validate({"loss_type": loss_type, "weighting": weighting})
    samples = [
        row("a", "t", ([1], [2, 3], [-1.0, -1.0], 1.0), ([4], [5], [-1.0], 2.0)),
        row("b", "t", ([1], [2, 3, 4, 5, 6, 7], [-1.0] * 6, 1.0)),
    ]
    answers, weights = Answers.of(samples, torch.device("cpu")), token_weights(samples, config)
    found = loss_inputs(samples, answers, answers.mask, weights, config).weights
    assert [2 * row.max().item() for row in found] == pytest.approx(list(expected))
    assert torch.equal(found > 0, answers.mask > 0)
