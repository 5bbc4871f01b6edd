"""`train` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.command_line import lightning
from support.models import save_small_model

TEXTBOOK = """
import torch

def ppo(given):
    bounded = given.ratios.clamp(0.8, 1.2)
    return -torch.minimum(given.ratios * given.advantages, bounded * given.advantages)

def nothing(logprobs, results, config):
    return torch.tensor(0.1) * results
"""


@pytest.mark.parametrize("own", ["loss: {file}:ppo", "context_loss: {file}:nothing"])
def test_a_loss_without_a_gradient_is_one_line_before_a_model_is_loaded(tmp_path: Path, own: str) -> None:
    (tmp_path / "mine.py").write_text(TEXTBOOK)
    key, name = own.format(file=tmp_path / "mine.py").split(": ")
    settings = {
        "store": {"url": f"sqlite:///{tmp_path}/store.db"},
        "policy": {"model": str(save_small_model(tmp_path / "model")), "directory": str(tmp_path / "policy")},
        "trainer": {"report_to": [], key: name},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    done = lightning("--config", tmp_path / "config.yaml", "train", "--once")
    told = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and f"trainer.{key} {name}: it has no gradient" in "".join(told)
    assert "Traceback" not in done.stderr and len(told) < 6, done.stderr
