"""The training loop on a small model, and rewarded rollouts without a trainer."""

from functools import partial
from pathlib import Path

import pytest

from support import ranks, training
from support.rewarded import traffic  # noqa: F401  (a fixture)
from support.training import Start


@pytest.fixture
def bench(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`async with bench("lora", …) as b:`; nobody is waited for long."""
    monkeypatch.setattr("lightning_proxy.trainer.waiting.RETRY_S", 0.01)
    monkeypatch.setattr("lightning_proxy.serving.swap.LEAVE_S", 0.05)
    monkeypatch.setattr("lightning_proxy.serving.swap.DRAIN_POLL_S", 0.01)
    return partial(training.bench, base, tmp_path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trainers of `support.ranks` find their model."""
    directory = tmp_path_factory.mktemp("ranks")
    ranks.make_model(directory / "model")
    return directory
