"""`plan` for machines that one does not have; `up`, `vllm` and `train` on a played machine with GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands import train as train_module
from lightning_proxy.commands.system.system import Launch, running_system
from lightning_proxy.commands.vllm import vllm_program
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.serving import mode
from lightning_proxy.trainer import plan as plan_module
from lightning_proxy.trainer.plan import make_plan
from lightning_proxy.trainer.plugins import Run
from support.models import SIZES

Machine = Callable[[str, list[float]], Config]


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A configuration for a model, on a machine with these GPUs: their files and what nvidia-smi would say."""

    def make(name: str, gibs: list[float], **sections: Any) -> Config:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES[name]))
        (tmp_path / "nvidia0").touch()
        monkeypatch.setattr(mode, "DEVICES", tmp_path)
        monkeypatch.setattr(plan_module, "cards", lambda: dict(enumerate(gibs)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        policy = {"model": str(tmp_path / "model"), "directory": tmp_path / "policy"}
        return Config.model_validate({"policy": policy, **sections})

    return make


def argument(argv: Any, name: str) -> str:
    return str(argv[argv.index(name) + 1])


def test_vllm_gets_its_gpus_and_its_share(on: Any) -> None:
    program = vllm_program(on("Qwen3-4B", [24.0]))
    assert program.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert "--tensor-parallel-size" not in program.argv
    assert 0.4 < float(argument(program.argv, "--gpu-memory-utilization")) < 0.6
    assert int(argument(program.argv, "--max-model-len")) >= 4096
    program = vllm_program(on("Qwen3-32B", [80.0] * 8))
    assert program.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert argument(program.argv, "--tensor-parallel-size") == "4"
    given = {"vllm": {"extra_args": ["--tensor-parallel-size", "2"], "devices": [0, 1]}}
    assert vllm_program(on("Qwen3-32B", [80.0] * 8, **given)).argv.count("--tensor-parallel-size") == 1


def test_the_trainer_sees_one_gpu_unless_a_launcher_shares_them_out(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    config = on("Qwen3-8B", [24.0, 24.0])

    async def look(*_: object) -> None:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

    monkeypatch.setattr(train_module, "_train", look)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    train_module.train(config, Run())
    monkeypatch.setenv("WORLD_SIZE", "1")
    train_module.train(config, Run())
    assert seen == [None, "1"]
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_a_base_model_that_is_sharded_over_gpus_is_trained_and_served(
    on: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = on("Qwen3-32B", [48.0] * 4)
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(config)
    started: list[Config] = []

    async def look(config: Config, *_: object) -> None:
        started.append(config)

    monkeypatch.setattr(train_module, "_train", look)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    train_module.train(config, Run())
    assert started[0].trainer.max_tokens_per_batch == 8192
    program = vllm_program(config, alone=True)
    assert program.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert float(argument(program.argv, "--gpu-memory-utilization")) > 0.8
    assert "does not fit" in caplog.text
    with pytest.raises(ConfigError, match="does not fit"):
        vllm_program(on("Qwen3-32B", [24.0]), alone=True)


async def test_up_refuses_what_cannot_fit_before_it_starts_anything(on: Any, tmp_path: Path) -> None:
    config = on("Qwen2.5-7B", [24.0], proxy={"port": 0})
    config = config.model_copy(update={"vllm": config.vllm.model_copy(update={"port": 8100})})
    logs = tmp_path / "logs"
    with pytest.raises(ConfigError, match="does not fit"):
        async with running_system(config, Launch(None), logs, lambda _: None, trains=True):
            pass
    assert not list(logs.glob("*"))


def test_a_trainer_without_a_vllm_beside_it_has_the_card_to_itself(on: Any) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(on("Qwen2.5-7B", [24.0]))
    alone = make_plan(on("Qwen2.5-7B", [24.0]), offline=True)
    elsewhere = {"upstreams": [{"name": "policy", "base_url": "http://10.0.0.2:8100/v1"}]}
    away = make_plan(on("Qwen2.5-7B", [24.0], **elsewhere))
    for found in (alone, away):
        assert found.cards and not found.vllm and (found.config.trainer.max_sample_tokens or 0) > 4096
    assert alone.trainer_devices == (0,)
