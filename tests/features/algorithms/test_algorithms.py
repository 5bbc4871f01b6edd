"""Algorithms by their names, and that each loss is finite.

`tests/reference/` has the losses' gradients, and the advantages of every credit with every baseline.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from lightning_proxy.core.config.trainer import LossType
from lightning_proxy.features.algorithms.config import AlgorithmsConfig
from lightning_proxy.trainer.step.losses import LossInputs, policy_loss
from support.paths import ROOT
from support.sections import TrainerConfig

LOSSES = [*(("loss_type", name) for name in get_args(LossType)), *(("loss", n) for n in TrainerConfig.known("loss"))]
REFUSED = {("vespo", "sequence"), ("luspo", "token"), *((name, "sequence") for name in TrainerConfig.known("loss"))}


def test_each_algorithm_has_a_name_and_a_word_in_the_documents() -> None:
    names = [name for kind in AlgorithmsConfig.functions.values() for name in kind]
    files = {path.stem for path in (ROOT / "features" / "algorithms").glob("[a-z]*.py")}
    assert {*names} == files - {"config"}
    pages = [(ROOT / "docs" / f"{page}.md").read_text() for page in ("credit", "settings")]
    assert [name for name in names for page in pages if f"`{name}`" not in page] == []


@pytest.mark.parametrize("kind", sorted(AlgorithmsConfig.functions))
def test_an_unknown_name_is_refused_with_those_there_are(kind: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TrainerConfig.model_validate({kind: "best"})
    (error,) = refused.value.errors()
    assert error["msg"].startswith(f"Value error, {', '.join(TrainerConfig.known(kind))}")
    assert error["msg"].endswith("got 'best'") and "\n" not in error["msg"]


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


@pytest.mark.parametrize(
    ("loss", "p", "q", "advantage", "expected"),
    [
        *((loss, 0.6, 0.5, 1.0, -1.2 * math.log(0.6)) for loss in ("dppo_tv", "dppo_kl")),
        *((loss, 0.7, 0.5, 1.0, 0.0) for loss in ("dppo_tv", "dppo_kl")),
        *((loss, 0.7, 0.5, -1.0, 1.4 * math.log(0.7)) for loss in ("dppo_tv", "dppo_kl")),
        ("icepop", 0.04, 0.1, 1.0, 0.0), ("icepop", 0.6, 0.1, -1.0, 0.0), ("icepop", 0.2, 0.1, 1.0, -2 * math.log(0.2)),
    ],
)  # fmt: skip
def test_tokens_out_of_the_band_are_dropped(loss: str, p: float, q: float, advantage: float, expected: float) -> None:
    assert float(masked(loss, *torch.tensor([[p], [q]]).double().log(), advantage)) == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "icepop"])
def test_probabilities_of_one_and_almost_none_have_finite_gradients(loss: str) -> None:
    logprobs = torch.tensor([0.0, -200.0, 0.0], requires_grad=True)
    value = masked(loss, logprobs, torch.tensor([0.0, 0.0, -200.0]), -1.0)
    value.backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and value.isfinite()


def masked(loss: str, logprobs: torch.Tensor, sampled: torch.Tensor, advantage: float) -> Any:
    config, ones = TrainerConfig.model_validate({"loss": loss}), torch.ones_like(sampled)[None]
    return policy_loss(LossInputs(logprobs[None], sampled[None], advantage * ones, ones, config, ones))
