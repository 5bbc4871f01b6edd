"""The entropy bonus: what its weight is after each step, and what it does to a policy that goes deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_proxy.core.config.trainer import EntropyConfig
from lightning_proxy.trainer.step.losses import EntropyBonus
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from support.sections import PolicyConfig, TrainerConfig
from support.small_model import save_small_model


def weights(bonus: EntropyBonus, *entropies: float) -> list[float]:
    """The weight in the first step, and after steps of these entropies."""
    found = [bonus.weight]
    for entropy in entropies:
        bonus.update(entropy)
        found.append(bonus.weight)
    return found


def test_with_a_target_the_weight_grows_while_the_entropy_is_low_and_counts_only_then() -> None:
    bonus = EntropyBonus(EntropyConfig(target=0.5, delta=0.1, max_coef=0.25))
    # By hand: 0 + 0.1 + 0.1, at most 0.25; over the target it shrinks and does not count.
    assert weights(bonus, 0.5, 0.4, 0.4, 0.6, 0.4) == pytest.approx([0.0, 0.1, 0.2, 0.25, 0.0, 0.25])


def answers(token: int, logprob: float, step: int) -> Batch:
    """One rollout whose answer, always the same token, is rewarded."""
    sample = Sample("r", "t", (0, 5, token), (0, 0, 1), (0.0, 0.0, logprob), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0))
    return Batch(step, (sample,), ("r",))


def entropy_after(directory: Path, steps: int, entropy: EntropyConfig) -> float:
    model = str(save_small_model(directory / "model"))
    config = TrainerConfig(learning_rate=0.1, report_to=[], dtype="float32", entropy=entropy)
    trainer = LightningTrainer(config, PolicyConfig(model=model, directory=directory))
    for step in range(steps):
        (logprob,) = trainer.logprobs([(0, 5, 7)])
        found = trainer.step(answers(7, logprob[-1], step))
    return found["entropy"]


def test_a_policy_that_would_go_deterministic_keeps_its_entropy(tmp_path: Path) -> None:
    without, fixed, adaptive = (
        entropy_after(tmp_path / name, 40, entropy)
        for name, entropy in (
            ("without", EntropyConfig()),
            ("fixed", EntropyConfig(coef=0.5)),
            ("adaptive", EntropyConfig(target=1.0, delta=0.2)),
        )
    )
    assert 2 * without < min(fixed, adaptive), (without, fixed, adaptive)


def test_an_adapted_weight_goes_on_after_a_restart(tmp_path: Path) -> None:
    model = str(save_small_model(tmp_path / "model"))
    config = TrainerConfig(report_to=[], dtype="float32", entropy=EntropyConfig(target=9.0, delta=0.25))
    trainer = LightningTrainer(config, PolicyConfig(model=model, directory=tmp_path))
    used = [trainer.step(answers(7, -3.0, step))["entropy_coef"] for step in (1, 2)]
    trainer.save(tmp_path / "checkpoint")
    again = LightningTrainer(config, PolicyConfig(model=model, directory=tmp_path))
    again.load(tmp_path / "checkpoint")
    assert [*used, again.step(answers(7, -3.0, 3))["entropy_coef"]] == [0.0, 0.25, 0.5]
