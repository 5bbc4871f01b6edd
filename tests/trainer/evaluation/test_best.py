"""The best version by smoothed training rewards: how it is chosen, and that its files stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.store.training import Step
from lightning_proxy.trainer.evaluation.best import smoothed
from lightning_proxy.trainer.main import train
from lightning_proxy.trainer.plugins.hooks import Run
from support.training import bench


def step(number: int, reward: float | None, rollouts: int = 8, **more: Any) -> Step:
    metrics = {"rollouts": rollouts, **({} if reward is None else {"reward_mean": reward}), **more}
    return Step(number, "trained", number - 1, number, None, 0.0, 0.0, metrics)


def test_a_lucky_step_does_not_make_a_version_the_best() -> None:
    rewards = [0.0, 1.0, 0.0, 0.0]
    found = smoothed([step(n, reward) for n, reward in enumerate(rewards, start=1)])
    assert found == pytest.approx({0: 1 / 3, 1: 1 / 4})
    weighted = smoothed([step(1, 1.0, 30), step(2, 0.0, 10), step(3, 0.0, 20)])
    assert weighted == pytest.approx({0: 0.5})


def test_steps_without_rewards_of_training_do_not_count() -> None:
    assert smoothed([step(1, 1.0), step(2, None), step(3, 0.5, method="sft"), step(4, 0.5), step(5, 0.4, 0)]) == {}


def test_ranks_name_no_version_the_best() -> None:
    assert smoothed([step(n, 0.5 + n * 1e-9) for n in range(1, 8)]) == {}


async def test_the_files_of_the_best_version_stay(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with bench(base, tmp_path, "lora", collapse={"action": "off"}) as b:
        for n, high in enumerate((0.0, 0.8, 0.8, 0.8, 0.0, 0.0, 0.0, 0.0)):
            for i in range(4):
                await b.rollout(f"t{n}", high + i / 20)
            await train(b.config, asyncio.Event(), Run(once=True))
        files = {version.version for version in await b.store.versions.with_files()}
        assert files == {1, 6, 7, 8}
    assert "the best is version 1: smoothed training reward" in caplog.text
