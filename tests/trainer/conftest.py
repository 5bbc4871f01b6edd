"""The training loop on a small model, and rewarded rollouts without a trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support import ranks, training
from support.rewarded import traffic  # noqa: F401  (a fixture)
from support.training import Start


@pytest.fixture
def bench(base: Path, tmp_path: Path) -> Start:
    """`async with bench("lora", …) as b:`"""
    return partial(training.bench, base, tmp_path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trainers of `support.ranks` find their model."""
    directory = tmp_path_factory.mktemp("ranks")
    ranks.make_model(directory / "model")
    return directory
