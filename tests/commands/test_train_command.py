"""`train` as it is typed."""

from __future__ import annotations

from pathlib import Path

import yaml

from support.command_line import lightning
from support.small_model import save_small_model


def test_train_once_says_when_there_was_nothing_to_learn_from(tmp_path: Path) -> None:
    settings = {
        "store": {"url": f"sqlite:///{tmp_path}/store.db"},
        "policy": {"model": str(save_small_model(tmp_path / "model")), "directory": str(tmp_path / "policy")},
        "trainer": {"report_to": []},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    done = lightning("--config", tmp_path / "config.yaml", "train", "--once")
    assert done.returncode == 0, done.stderr
    assert "no step was taken: `lightning-proxy status` says what waits" in done.stderr
