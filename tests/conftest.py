"""Shared fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_proxy.proxy.publish_mode import has_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_gpu():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No test sees the settings of whoever runs it."""
    for name in list(os.environ):
        if name.startswith(("LIGHTNING_", "OPENAI_")):
            monkeypatch.delenv(name)
    yield
