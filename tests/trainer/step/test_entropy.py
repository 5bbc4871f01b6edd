"""The weight of the entropy bonus after each step. Its gradient: tests/reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_proxy.core.config.trainer import EntropyConfig
from lightning_proxy.trainer.step.losses import EntropyBonus
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from support.models import save_small_model
from support.sections import PolicyConfig, TrainerConfig


def test_with_a_target_the_weight_grows_while_the_entropy_is_low_and_counts_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EntropyBonus, "MOST", 0.0125)
    bonus = EntropyBonus(EntropyConfig(target=0.5))
    used = []
    for entropy in (0.5, 0.4, 0.4, 0.6, 0.4):
        used.append(bonus.weight)
        bonus.update(entropy)
    # By hand: 0 + 0.005 + 0.005, at most 0.0125; over the target it shrinks and does not count.
    assert [*used, bonus.weight] == pytest.approx([0.0, 0.005, 0.01, 0.0125, 0.0, 0.0125])


def trainer(where: Path, **entropy: float) -> LightningTrainer:
    model = str(save_small_model(where / "model"))
    config = TrainerConfig(learning_rate=0.1, report_to=[], dtype="float32", entropy=EntropyConfig(**entropy))
    return LightningTrainer(config, PolicyConfig(model=model, directory=where))


def step(learner: LightningTrainer, number: int) -> dict[str, float]:
    """The metrics of a step that rewards an answer, which is always the same token."""
    (logprobs,) = learner.logprobs([(0, 5, 7)])
    sample = Sample("r", "t", (0, 5, 7), (0, 0, 1), (0.0, 0.0, logprobs[-1]), (0.0, 0.0, 1.0), (1.0,) * 3)
    return learner.step(Batch(number, (sample,), ("r",)))


def test_a_policy_that_would_go_deterministic_keeps_its_entropy(tmp_path: Path) -> None:
    without, bonus = trainer(tmp_path / "without"), trainer(tmp_path / "bonus", coef=0.5)
    ends = [[step(learner, number)["entropy"] for number in range(30)][-1] for learner in (without, bonus)]
    assert 2 * ends[0] < ends[1], ends


def test_an_adapted_weight_goes_on_after_a_restart(tmp_path: Path) -> None:
    first, again = (trainer(tmp_path, target=9.0) for _ in range(2))
    used = [step(first, number)["entropy_coef"] for number in (1, 2)]
    first.save(tmp_path / "checkpoint")
    again.load(tmp_path / "checkpoint")
    assert [*used, step(again, 3)["entropy_coef"]] == [0.0, 0.005, 0.01]
