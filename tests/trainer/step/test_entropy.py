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


def test_an_adapted_weight_goes_on_after_a_restart(tmp_path: Path) -> None:
    def trainer() -> LightningTrainer:
        return LightningTrainer(config, PolicyConfig(model=model, directory=tmp_path))

    def coef(learner: LightningTrainer, step: int) -> float:
        sample = Sample("r", "t", (0, 5, 7), (0, 0, 1), (0.0, 0.0, -3.0), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0))
        return learner.step(Batch(step, (sample,), ("r",)))["entropy_coef"]

    model = str(save_small_model(tmp_path / "model"))
    config = TrainerConfig(report_to=[], dtype="float32", entropy=EntropyConfig(target=9.0))
    first, again = trainer(), trainer()
    used = [coef(first, step) for step in (1, 2)]
    first.save(tmp_path / "checkpoint")
    again.load(tmp_path / "checkpoint")
    assert [*used, coef(again, 3)] == [0.0, 0.005, 0.01]
