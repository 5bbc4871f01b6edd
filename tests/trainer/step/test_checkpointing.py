"""With gradient checkpointing a step computes layers twice. Scoring computes them once."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lightning_proxy.trainer.step.trainer import LightningTrainer  # noqa: E402
from support.ranks import batch, make_model, trainer  # noqa: E402


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpointing")
    make_model(directory / "model")
    return directory


def counted(learner: LightningTrainer) -> Counter[str]:
    """How often the first layer was computed."""
    calls: Counter[str] = Counter()
    layer = learner.policy_model.base_model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.update(["forward"]))
    return calls


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1}])
def test_a_step_computes_its_layers_twice(directory: Path, settings: Any) -> None:
    """That it gets the same gradients: tests/reference."""
    learner = trainer(directory, gradient_checkpointing=True, **settings)
    passes = counted(learner)
    metrics = learner.step(batch(1))
    of_the_base = metrics["micro_batches"] if settings else 0
    assert passes["forward"] == 2 * metrics["micro_batches"] + of_the_base


def test_scoring_computes_its_layers_once(directory: Path) -> None:
    learner = trainer(directory, gradient_checkpointing=True)
    learner.step(batch(1))
    passes = counted(learner)
    learner.logprobs([[1, 2, 3], [1, 2, 4]])
    assert passes["forward"] == 1
