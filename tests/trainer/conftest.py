"""What the trainer's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.small_model import save_small_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("base"))
