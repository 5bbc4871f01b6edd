"""What a step says of its tokens, and a loss of one's own. The gradient of each loss: tests/reference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Guidance, Sample
from support.paths import EXAMPLES
from support.ranks import batch, make_model, trainer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("losses")
    make_model(directory / "model")
    return directory


def test_what_a_guide_says_is_measured(directory: Path) -> None:
    learner = trainer(directory)
    first, second = learner.logprobs([[3, 4, 5]])[0][1:]
    said = Guidance((math.nan, first - 1.0, math.nan), 0.5)
    none = (0.0,) * 3
    sample = Sample("r", "t", (3, 4, 5), (0, 1, 1), (0.0, first, second), none, (1.0,) * 3, guidance=said)
    metrics = learner.step(Batch(1, (sample,), ()))
    assert (metrics["guided_share"], metrics["guide_advantage"], metrics["guide_kl"]) == pytest.approx((0.5, 0.5, 1.0))
    assert learner.logprobs([[3, 4]])[0][1] < first  # the guide finds the token less likely than the policy does


@pytest.mark.parametrize("place", ["captured log-probabilities", "advantages"])
def test_a_skipped_step_says_what_was_not_finite_and_where(directory: Path, place: str) -> None:
    learner = trainer(directory)
    field = "advantages" if place == "advantages" else "logprobs"
    first, *others = batch(1).samples
    bad = replace(first, **{field: tuple(math.nan if m else 0.0 for m in first.mask)})
    metrics = learner.step(Batch(1, (bad, *others), ()))
    assert metrics["skipped"] == 1.0
    assert learner.skipped_because == f"{place} not finite in rollout {first.rollout_id}"
    assert learner.step(Batch(2, tuple(others), ()))["skipped"] == 0.0
    assert learner.skipped_because is None


def test_a_gradient_that_is_not_finite_is_told_from_a_loss(directory: Path) -> None:
    learner = trainer(directory)
    parameter = next(p for p in learner.model.parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda slope: slope * math.inf)
    assert learner.step(batch(1))["skipped"] == 1.0
    handle.remove()
    assert learner.skipped_because is not None
    assert learner.skipped_because.startswith("the gradient is not finite over rollouts 0-0, 0-1, ")
    assert learner.skipped_because.endswith("and 10 more")


def test_a_loss_of_ones_own_takes_the_place_of_the_products(directory: Path) -> None:
    def moved(**own: Any) -> tuple[float, LightningTrainer]:
        learner = trainer(
            directory, loss_type="grpo", clip_low=0.2, clip_high=0.2, importance_cap=1e6, max_grad_norm=1e9, **own
        )
        return learner.step(batch(1))["loss"], learner

    (expected, built), (loss, by_hand) = moved(), moved(loss=f"{EXAMPLES}/hooks/loss.py:clipped")
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, weight in built.adapter().items():
        torch.testing.assert_close(by_hand.adapter()[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return given.logprobs.sum()", r"a tensor of shape \(\d+, \d+\) is needed, one number per token"),
        ("return given.nothing", r"AttributeError: .*nothing.* \(line 2\)"),
        ("return -given.ratios * given.advantages", r"it has no gradient, .* given\.ratios .* carry none"),
        ("return (-given.ratios * given.advantages).requires_grad_()", r"it has no gradient, .*"),
    ],
)
def test_a_wrong_loss_is_named(directory: Path, tmp_path: Path, body: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(given):\n    {body}\n")
    learner = trainer(directory, loss=f"{tmp_path}/mine.py:f")
    with pytest.raises(ConfigError, match=f"^trainer.loss {tmp_path}/mine.py:f: {told}$"):
        learner.step(batch(1))
