"""What a token weighs in a step: by the loss, or by `trainer.weighting`."""

from __future__ import annotations

import pytest
import torch

from lightning_proxy.trainer.step.losses import Answers, loss_inputs, token_weights
from support.sampled_row import row
from support.sections import TrainerConfig


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
    inputs = loss_inputs(samples, answers, weights, by_answer=weighting == "sequence")
    found = inputs["token_weights"]
    assert [2 * row.max().item() for row in found] == pytest.approx(list(expected))
    assert torch.equal(found > 0, answers.mask > 0)
