"""Checkpoints that cannot be gone on with are refused, with the reason; what changed since is said; full disks."""

from __future__ import annotations

import errno
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.config.section import feature_sections
from lightning_proxy.core.errors import ConfigError, NotSaved
from lightning_proxy.features.judge.config import CallsConfig
from lightning_proxy.trainer.checkpoint import atomic_directory
from lightning_proxy.trainer.step.trainer import STATE_FILE
from lightning_proxy.trainer.types import Batch, Sample
from support.models import save_small_model
from support.training import learner


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lora_rank": 8}, "trainer.lora_rank 4 → 8"),
        ({"lora_alpha": 64}, "trainer.lora_alpha 32 → 64"),
        ({"lora_targets": ["q_proj"]}, 'trainer.lora_targets "language" → ["q_proj"]'),
    ],
)
def test_another_adapter_is_refused(base: Path, tmp_path: Path, settings: dict[str, Any], what: str) -> None:
    learner(base, tmp_path).save(tmp_path / "1")
    other = learner(base, tmp_path, **settings)
    before = other.adapter()
    with pytest.raises(ConfigError, match=f"{re.escape(what)}.*set it back, or start over"):
        other.load(tmp_path / "1")
    assert all(torch.equal(value, before[name]) for name, value in other.adapter().items())


def test_another_base_model_is_refused_and_one_that_was_moved_is_not(base: Path, tmp_path: Path) -> None:
    learner(base, tmp_path).save(tmp_path / "1")
    learner(save_small_model(tmp_path / "moved"), tmp_path).load(tmp_path / "1")
    other = save_small_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=rf'policy.model "{base}" → "{other}"'):
        learner(other, tmp_path).load(tmp_path / "1")


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "rubbish"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(base: Path, tmp_path: Path, damage: str) -> None:
    saved = learner(base, tmp_path)
    saved.save(tmp_path / "1")
    path = tmp_path / "1" / STATE_FILE
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "rubbish": b"rubbish" * 99}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    with pytest.raises(ConfigError, match=r"state.pt is damaged .*: restore it from a backup, or make an earlier"):
        saved.load(tmp_path / "1")


def test_without_optimizer_state_its_moments_and_the_schedule_begin_anew_and_that_is_said(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = learner(base, tmp_path, lr_scheduler="linear", max_steps=4)
    saved.save(tmp_path / "1")
    state = torch.load(tmp_path / "1" / STATE_FILE, weights_only=True)
    del state["optimizer"]
    torch.save(state, tmp_path / "1" / STATE_FILE)
    tokens = (0, 5, 6, 7)
    sample = Sample("t", "r", tokens, (0, 0, 1, 1), (0.0, 0.0, -3.0, -3.0), (1.0,) * 4, (1.0,) * 4)
    rates = [saved.step(Batch(step, (sample,), ("r",)))["lr"] for step in (1, 2)]
    assert saved.optimizer.state and rates[1] < rates[0]
    with caplog.at_level(logging.WARNING):
        saved.load(tmp_path / "1")
    assert "has no optimizer state: its moments and the schedule start again" in caplog.text
    assert not saved.optimizer.state and saved.step(Batch(1, (sample,), ("r",)))["lr"] == rates[0]


@pytest.mark.parametrize("there", [0, 1, 3])
def test_training_goes_on_with_fewer_or_more_gpus(
    base: Path, tmp_path: Path, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner(base, tmp_path).save(tmp_path / "1")
    state = torch.load(tmp_path / "1" / STATE_FILE)
    torch.save({**state, "cuda_rng": [torch.get_rng_state()] * 2}, tmp_path / "1" / STATE_FILE)
    again, seeded = learner(base, tmp_path), list[int]()
    monkeypatch.setattr("torch.cuda.is_available", lambda: there > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda rng, device: seeded.append(device))
    again.load(tmp_path / "1")
    assert seeded == list(range(min(there, 2)))


def test_no_secret_is_in_a_checkpoint(base: Path, tmp_path: Path) -> None:
    judge = CallsConfig(model="openai/gpt").model_dump()
    teacher = {"base_url": "http://h/v1", "api_key": "sk-of-the-teacher"}
    learner(base, tmp_path, judge=judge, teacher=teacher).save(tmp_path / "1")
    text = (tmp_path / "1" / "config.json").read_text()
    saved = json.loads(text)
    assert "sk-of-the-teacher" not in text
    assert {key.split(".")[0] for key in saved} == {"trainer", "policy", "weights of policy", *feature_sections()}
    assert not [key for key in saved if "key" in key]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.ENOSPC, "No space left on device"), NotSaved), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_directory_that_is_not_finished_leaves_what_was_there(
    tmp_path: Path, error: BaseException, raised: type[BaseException]
) -> None:
    with atomic_directory(tmp_path / "1") as directory:
        (directory / "a").write_text("whole")
    with pytest.raises(raised) as said, atomic_directory(tmp_path / "1") as directory:
        (directory / "a").write_text("ha")
        raise error
    assert raised is not NotSaved or re.search(r"/1 cannot be written: .*No space left", str(said.value))
    assert (tmp_path / "1" / "a").read_text() == "whole"
    with atomic_directory(tmp_path / "1") as directory:
        assert not list(directory.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
