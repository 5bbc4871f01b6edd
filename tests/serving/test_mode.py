"""Whether there is a GPU is told by device files, of which a container may have any."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_proxy.serving import mode


@pytest.mark.parametrize(
    ("files", "visible", "expected"),
    [
        (["nvidia0", "nvidiactl"], None, True),
        (["nvidia3", "nvidiactl", "nvidia-uvm"], None, True),
        (["nvidia3"], "3", True),
        (["nvidia0"], "", False),
        (["nvidia0"], "-1", False),
        (["nvidiactl", "nvidia-uvm"], None, False),
        ([], None, False),
    ],
)
def test_any_card_is_a_gpu_unless_it_is_hidden_from_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], visible: str | None, expected: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(mode, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert mode.has_gpu() == expected
