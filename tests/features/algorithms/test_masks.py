"""DPPO's and IcePop's masks: by hand, and their gradients beside loops in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_proxy.trainer.step.losses import LossInputs, cispo, policy_loss
from support.sections import TrainerConfig

LOSSES = ("dppo_tv", "dppo_kl", "icepop")
NO_CAP = TrainerConfig(importance_cap=None)
WIDE = {"tv": 2.0, "kl": 1e9, "ratio_low": 1e-30, "ratio_high": 1e30}


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


def keeps_tv(p: float, q: float, advantage: float) -> bool:
    return p - q <= 0.15 if advantage > 0 else q - p <= 0.15


def keeps_kl(p: float, q: float, advantage: float) -> bool:
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return divergence <= 0.05 or (p <= q if advantage > 0 else p >= q)


def keeps_icepop(p: float, q: float, advantage: float) -> bool:
    return 0.5 <= p / q <= 5.0


def answers(config: TrainerConfig) -> LossInputs:
    """Six answers of up to 40 tokens in float64."""
    chance = torch.Generator().manual_seed(1)
    mask = (torch.arange(40) < torch.tensor([[40], [1], [17], [33], [40], [8]])).double()
    p, q = (torch.rand(6, 40, dtype=torch.float64, generator=chance) * 0.98 + 0.01 for _ in range(2))
    advantages = torch.randn(6, 1, dtype=torch.float64, generator=chance).expand(6, 40)
    weights = torch.rand(6, 1, dtype=torch.float64, generator=chance) * mask
    return LossInputs((p.log() * mask).requires_grad_(), q.log() * mask, advantages * mask, mask, config, weights)


@pytest.mark.parametrize(("loss", "keeps"), [*zip(LOSSES, (keeps_tv, keeps_kl, keeps_icepop), strict=True)])
def test_loss_and_gradient_are_those_of_a_loop(loss: str, keeps: Callable[[float, float, float], bool]) -> None:
    given = answers(config(loss))
    logprobs, value = given.logprobs, policy_loss(given)
    value.backward()
    expected, slopes, dropped = 0.0, [[0.0] * 40 for _ in range(6)], 0
    for i in range(6):
        for j in range(int(given.mask[i].sum())):
            logp, logq = float(logprobs[i, j].detach()), float(given.sampled_logprobs[i, j])
            advantage, weight = float(given.advantages[i, j]), float(given.weights[i, j])
            if not keeps(math.exp(logp), math.exp(logq), advantage):
                dropped += 1
                continue
            slopes[i][j] = -weight * advantage * math.exp(logp - logq)
            expected += slopes[i][j] * logp
    assert 20 < dropped < 100
    assert float(value.detach()) == pytest.approx(expected, rel=1e-12)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_limits_they_are_cispo_without_a_cap(loss: str) -> None:
    given = answers(config(loss, mask=WIDE))
    found, expected = policy_loss(given).detach(), given.total(cispo(replace(given, config=NO_CAP))).detach()
    assert float(found) == pytest.approx(float(expected))


@pytest.mark.parametrize("loss", LOSSES)
def test_probabilities_of_one_and_almost_none_have_finite_gradients(loss: str) -> None:
    logprobs = torch.tensor([[0.0, -200.0, 0.0]], requires_grad=True)
    ones = torch.ones(1, 3)
    sampled = torch.tensor([[0.0, 0.0, -200.0]])
    value = policy_loss(LossInputs(logprobs, sampled, -ones, ones, config(loss), ones))
    value.backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and value.isfinite()
