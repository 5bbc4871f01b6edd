"""DPPO's and IcePop's masks by hand. `tests/reference/test_gradients.py` has their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_proxy.trainer.step.losses import LossInputs, policy_loss
from support.sections import TrainerConfig


def config(loss: str, **changed: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"loss": loss, **changed})


def loss_of(loss: str, p: float, q: float, advantage: float) -> float:
    logp, logq, a = (torch.tensor([[value]], dtype=torch.float64) for value in (math.log(p), math.log(q), advantage))
    one = torch.ones(1, 1, dtype=torch.float64)
    return float(policy_loss(LossInputs(logp, logq, a, one, config(loss), one)))


@pytest.mark.parametrize(
    ("loss", "p", "q", "advantage", "expected"),
    [
        ("dppo_tv", 0.6, 0.5, 1.0, -1.2 * math.log(0.6)),
        ("dppo_tv", 0.7, 0.5, 1.0, 0.0),
        ("dppo_tv", 0.7, 0.5, -1.0, 1.4 * math.log(0.7)),
        ("dppo_tv", 0.3, 0.5, -1.0, 0.0),
        ("dppo_tv", 1e-3, 1e-5, 1.0, -100 * math.log(1e-3)),
        ("dppo_kl", 0.6, 0.5, 1.0, -1.2 * math.log(0.6)),
        ("dppo_kl", 0.7, 0.5, 1.0, 0.0),
        ("dppo_kl", 0.7, 0.5, -1.0, 1.4 * math.log(0.7)),
        ("dppo_kl", 0.3, 0.5, -1.0, 0.0),
        ("icepop", 0.04, 0.1, 1.0, 0.0),
        ("icepop", 0.6, 0.1, -1.0, 0.0),
        ("icepop", 0.2, 0.1, 1.0, -2 * math.log(0.2)),
    ],
)
def test_tokens_out_of_the_band_are_dropped(loss: str, p: float, q: float, advantage: float, expected: float) -> None:
    assert loss_of(loss, p, q, advantage) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "icepop"])
def test_probabilities_of_one_and_almost_none_have_finite_gradients(loss: str) -> None:
    logprobs = torch.tensor([[0.0, -200.0, 0.0]], requires_grad=True)
    ones = torch.ones(1, 3)
    sampled = torch.tensor([[0.0, 0.0, -200.0]])
    value = policy_loss(LossInputs(logprobs, sampled, -ones, ones, config(loss), ones))
    value.backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and value.isfinite()
