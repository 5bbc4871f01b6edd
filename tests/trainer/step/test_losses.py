"""What a step says of its tokens, losses of one's own, and the entropy bonus' weight. Gradients: tests/reference."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.config.trainer import EntropyConfig
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.step.losses import EntropyBonus
from lightning_proxy.trainer.types import Batch, Guidance, Sample
from support.paths import EXAMPLES
from support.ranks import batch, trainer


def test_what_a_guide_says_is_measured(directory: Path) -> None:
    trained = trainer(directory)
    first, second = trained.logprobs([[3, 4, 5]])[0][1:]
    said = Guidance((math.nan, first - 1.0, math.nan), 0.5)
    none = (0.0,) * 3
    sample = Sample("r", "t", (3, 4, 5), (0, 1, 1), (0.0, first, second), none, (1.0,) * 3, guidance=said)
    metrics = trained.step(Batch(1, (sample,), ()))
    assert (metrics["guided_share"], metrics["guide_advantage"], metrics["guide_kl"]) == pytest.approx((0.5, 0.5, 1.0))
    assert trained.logprobs([[3, 4]])[0][1] < first  # the guide finds the token less likely than the policy does


def test_a_skipped_step_says_what_was_not_finite_and_where(directory: Path) -> None:
    trained = trainer(directory)
    first, *others = batch(1).samples
    bad = replace(first, logprobs=tuple(math.nan if m else 0.0 for m in first.mask))
    assert trained.step(Batch(1, (bad, *others), ()))["skipped"] == 1.0
    assert trained.skipped_because == f"captured log-probabilities are not finite in rollout {first.rollout_id}"
    parameter = next(p for p in trained.model.parameters() if p.requires_grad)
    handle = parameter.register_hook(lambda slope: slope * math.inf)
    assert trained.step(batch(1))["skipped"] == 1.0
    handle.remove()
    why = str(trained.skipped_because)
    assert why.startswith("the gradient is not finite for rollouts 0-0, 0-1, ") and why.endswith("and 10 more")
    assert trained.step(Batch(2, tuple(others), ()))["skipped"] == 0.0 and trained.skipped_because is None


def test_a_loss_of_ones_own_takes_the_place_of_the_products(directory: Path) -> None:
    grpo: Any = {"loss_type": "grpo", "clip_low": 0.2, "clip_high": 0.2, "importance_cap": 1e6, "max_grad_norm": 1e9}
    built, by_hand = trainer(directory, **grpo), trainer(directory, **grpo, loss=f"{EXAMPLES}/hooks/loss.py:clipped")
    assert by_hand.step(batch(1))["loss"] == pytest.approx(built.step(batch(1))["loss"], rel=1e-5)
    for name, weight in built.adapter().items():
        torch.testing.assert_close(by_hand.adapter()[name], weight, atol=1e-5, rtol=1e-4)


def test_a_wrong_loss_is_named(directory: Path, tmp_path: Path) -> None:
    for i, (body, told) in enumerate((
        ("given.logprobs.sum()", r"it must return a tensor of shape \(\d+, \d+\), one number per token"),
        ("given.nothing", r"it raised AttributeError: .*nothing.* \(line 1\)"),
        ("-given.ratios * given.advantages", r"it has no gradient, .* given\.ratios .* carry none\)"),
        ("(-given.ratios * given.advantages).requires_grad_()", r"it has no gradient, .*"),
    )):  # fmt: skip
        file = tmp_path / f"mine{i}.py"
        file.write_text(f"f = lambda given: {body}\n")
        trained = trainer(directory, loss=f"{file}:f")
        with pytest.raises(ConfigError, match=f"^trainer.loss {file}:f: {told}$"):
            trained.step(batch(1))


def test_with_a_target_the_weight_grows_while_the_entropy_is_low_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntropyBonus, "MOST", 0.0125)
    bonus = EntropyBonus(EntropyConfig(target=0.5))
    used = []
    for entropy in (0.5, 0.4, 0.4, 0.6, 0.4):
        used.append(bonus.weight)
        bonus.update(entropy)
    # By hand: 0 + 0.005 + 0.005, at most 0.0125; over the target it shrinks and does not count.
    assert [*used, bonus.weight] == pytest.approx([0.0, 0.005, 0.01, 0.0125, 0.0, 0.0125])


def test_an_adapted_weight_goes_on_after_a_restart(directory: Path, tmp_path: Path) -> None:
    first, again = (trainer(directory, entropy={"target": 9.0}) for _ in range(2))
    used = [first.step(batch(number))["entropy_coef"] for number in (1, 2)]
    first.save(tmp_path / "checkpoint")
    again.load(tmp_path / "checkpoint")
    assert [*used, again.step(batch(3))["entropy_coef"]] == [0.0, 0.005, 0.01]
