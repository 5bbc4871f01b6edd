"""A run of fine-tuning that is killed after any of its checkpoints ends with the weights and numbers of a whole one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.features.tune.preferences import DPO, KTO, Pair, Pairs, Thumb, Thumbs
from lightning_proxy.features.tune.run import last_epoch, tune
from lightning_proxy.features.tune.sft import SFT, Traces
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Sample
from support.sections import PolicyConfig, TrainerConfig

Tune = Callable[[LightningTrainer, Path, Callable[[], bool]], dict[str, float] | None]
OF_TIME = {"step_s", "trained_tokens_per_s", "computed_tokens_per_s"}


def row(name: str, *answer: int) -> Sample:
    ids, mask = (0, 5, 6, *answer), (0, 0, 0, *(1 for _ in answer))
    zeros = (0.0,) * len(ids)
    return Sample(name, name, ids, mask, zeros, zeros, (1.0,) * len(ids), (name,))


ROWS = tuple(row(str(n), 9 + n, 8 + n, 1) for n in range(6))
PAIRS = Pairs(tuple(Pair(a, b) for a, b in zip(ROWS[::2], ROWS[1::2], strict=True)), (Pair(ROWS[0], ROWS[1]),), {})
THUMBS = Thumbs(tuple(Thumb(sample, n % 2 == 0) for n, sample in enumerate(ROWS)), (), {})
METHODS: dict[str, Tune] = {
    "sft": lambda trainer, out, stopped: tune(SFT, trainer, Traces(ROWS, ROWS[:1], {}), out, stopped),
    "dpo": lambda trainer, out, stopped: tune(DPO, trainer, PAIRS, out, stopped),
    "kto": lambda trainer, out, stopped: tune(KTO, trainer, THUMBS, out, stopped),
}


@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        ("dpo", 1),  # one routine runs all of them
        *(pytest.param("sft", epochs, marks=pytest.mark.long) for epochs in (1, 2)),
        *(pytest.param("kto", epochs, marks=pytest.mark.long) for epochs in (1, 2)),
        pytest.param("dpo", 2, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_run_goes_on_from_each_of_its_checkpoints(base: Path, tmp_path: Path, method: str, epochs: int) -> None:
    def tune(out: Path, stopped: Callable[[], bool]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        section: dict[str, Any] = {"epochs": epochs, "batch_tokens": 6, "learning_rate": 0.01}
        settings = {"report_to": [], "dtype": "float32", "group_size": 2, "tasks_per_step": 1}
        config = TrainerConfig.model_validate({**settings, method: section})
        trainer = LightningTrainer(config, PolicyConfig(model=str(base), directory=tmp_path))
        metrics = METHODS[method](trainer, out, stopped)
        assert metrics is not None
        return metrics, trainer.adapter()

    whole, killed = tmp_path / "whole", []

    def keeps_what_a_kill_would_leave() -> bool:
        """Is asked after each step, before its checkpoint is written."""
        if any(whole.glob("checkpoint-*")):
            killed.append(tmp_path / f"killed-{len(killed)}")
            shutil.copytree(whole, killed[-1])
        return False

    metrics, weights = tune(whole, keeps_what_a_kill_would_leave)
    assert metrics["step_s"] > 0 and killed
    for left in (*killed, whole):  # `whole` was killed after its last checkpoint and before its end
        again, same = tune(left, lambda: False)
        assert {name: again[name] for name in again if name not in OF_TIME} == pytest.approx(
            {name: metrics[name] for name in metrics if name not in OF_TIME}, abs=1e-5
        ), left.name
        assert all(torch.allclose(weight, weights[name], atol=1e-6) for name, weight in same.items()), left.name


def test_the_numbers_of_an_epoch_are_means_over_its_steps() -> None:
    history = [
        {"loss": 9.0, "epoch": 1.0, "step": 3, "seconds": 1.0},
        {"loss": 1.0, "epoch": 1.67, "step": 5, "seconds": 2.0},
        {"loss": 4.0, "epoch": 2.0, "step": 6, "seconds": 3.0, "held_out_loss": 5.0},
        {"train_loss": 3.0, "epoch": 2.0, "step": 6},
    ]
    found = last_epoch(history)
    assert (found["loss"], found["held_out_loss"], found["seconds"]) == (2.0, 5.0, 6.0)
