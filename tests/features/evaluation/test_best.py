"""The best version: that its files stay, by held-out rollouts that anybody made, and that the trainer names it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.features.evaluation.evaluations import Evaluations
from lightning_proxy.features.evaluation.evaluator import Evaluator
from lightning_proxy.trainer.plugins import Run
from lightning_proxy.trainer.train import train
from support.training import bench


async def test_the_files_of_the_best_version_stay(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with bench(base, tmp_path, "lora", collapse={"action": "off"}) as b:
        for n in range(8):
            for i in range(4):
                await b.rollout(f"t{n}", 0.1 * n + i / 20, version=n)
            await train(b.config, asyncio.Event(), Run(once=True))
            if n == 1:  # `lightning-proxy eval --models 1`
                await b.store.rollouts.open([(RolloutName("held-out", "h", mode="eval"), "x")], {}, policy_version=1)
            if n == 5:  # for so long it is evaluated, and its files stay
                await b.store.rewards.post([Reward("held-out", 1.0)])
        files = {version.version for version in await b.store.versions.with_files()}
        assert files == {1, 6, 7, 8}
    assert "the best is version 1: held-out reward 1.000" in caplog.text


async def test_versions_are_evaluated_between_steps(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: Evaluator, version: int) -> dict[str, float]:
        steps = await b.store.steps.all()
        assert all("publish_s" in step.metrics for step in steps), "no step is under way"
        return {"reward": 0.5, "low": 0.4, "high": 0.6}

    (tmp_path / "tasks.jsonl").write_text("{}")
    monkeypatch.setattr(Evaluator, "_run", run)
    async with bench(base, tmp_path, "lora", collapse={"action": "off"}) as b:
        section = {"tasks": str(tmp_path / "tasks.jsonl"), "command": "true", "every_steps": 2}
        config = Config.model_validate(b.config.model_dump() | {"evaluation": section})
        for n in range(5):
            await b.groups(f"t{n}a", f"t{n}b")
            await train(config, asyncio.Event(), Run(once=True))
        assert [*await Evaluations(b.store).read()] == [0, 2, 4]
