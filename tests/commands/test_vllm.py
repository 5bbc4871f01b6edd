"""The vLLM that is started: its parsers, its GPUs, and what it tells nobody. `up` and `train` on a played machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands import train as train_module
from lightning_proxy.commands.command_line import OFF
from lightning_proxy.commands.system.system import Launch, check_addresses, running_system
from lightning_proxy.commands.vllm import FAMILIES, WRITTEN, parsers_of, served_model, vllm_program, without_tools
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.serving import mode
from lightning_proxy.serving.vllm_worker import RELOAD
from lightning_proxy.trainer import plan as plan_module
from lightning_proxy.trainer.plan import make_plan
from lightning_proxy.trainer.plugins import Run
from support.models import SIZES


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def tools(parser: str) -> list[str]:
    return ["--enable-auto-tool-choice", "--tool-call-parser", parser]


OWN = ("--tool-call-parser", "qwen3_xml", "--enable-auto-tool-choice")


@pytest.mark.parametrize(
    ("name", "given", "argv", "warns"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", (), tools("hermes"), False),
        ("Qwen/Qwen3-0.6B", (), [*tools("hermes"), "--reasoning-parser", "qwen3"], False),
        ("Qwen/Qwen3-0.6B", OWN, ["--reasoning-parser", "qwen3"], False),
        ("Qwen/Qwen3-4B-Instruct-2507", (), tools("hermes"), False),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", (), tools("qwen3_coder"), False),
        ("meta-llama/Llama-3.2-1B-Instruct", (), tools("llama3_json"), False),
        ("openai/gpt-oss-20b", (), [*tools("openai"), "--reasoning-parser", "openai_gptoss"], False),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", (), ["--reasoning-parser", "deepseek_r1"], True),
        ("org/unheard-of", (), [], True),
        ("org/unheard-of", ("--enable-auto-tool-choice", "--tool-call-parser=pythonic"), [], False),
    ],
)
def test_known_families_get_their_parsers_unless_the_user_names_one(
    name: str, given: tuple[str, ...], argv: list[str], warns: bool
) -> None:
    found, warning = parsers_of(name, given)
    assert found == argv
    assert ("requests with tools will get HTTP 400" in (warning or "")) == warns


def test_a_directory_is_known_by_its_template_and_served_under_its_name(model: Path) -> None:
    config = Config.model_validate({"policy": {"model": str(model)}})
    assert served_model(config) == "tiny-model"
    assert served_model(Config.model_validate({"policy": {"model": "org/name"}})) == "org/name"
    text = "say <tool_call>{...}</tool_call>"
    for file, content in (
        ("tokenizer_config.json", json.dumps({"chat_template": text})),
        ("chat_template.jinja", text),
    ):
        assert without_tools(config) is not None
        (model / file).write_text(content)
        assert "hermes" in vllm_program(config).argv and without_tools(config) is None
        (model / file).unlink()


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_has_these_parsers() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    of_tools, of_thoughts = (
        {*re.findall(r'^    "([\w-]+)": \(', (Path(spec.origin).parent / kind / "__init__.py").read_text(), re.M)}
        for kind in ("tool_parsers", "reasoning")
    )
    assert {tool for _, tool, _ in FAMILIES if tool} | {tool for _, tool in WRITTEN} <= of_tools
    assert {reasoning for _, _, reasoning in FAMILIES if reasoning} <= of_thoughts


def test_vllm_is_started_as_proxy_and_trainer_need_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(publish: str, **trainer: Any) -> Any:
        policy = {"model": str(model), "publish": publish}
        return vllm_program(Config.model_validate({"policy": policy, "trainer": trainer}))

    merged = program("merged")
    assert "--enable-lora" not in merged.argv and merged.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--enable-scale-out" in merged.argv, "the routes between messages and tokens"
    assert option(merged.argv, "--logprobs-mode") == "processed_logprobs", "those after temperature"
    lora = program("lora", lora_rank=12)
    assert "--enable-lora" in lora.argv and lora.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert option(lora.argv, "--max-lora-rank") == "16", "a rank that vLLM has"
    for one in (merged, lora):
        assert option(one.argv, "--host") == "127.0.0.1", "operator routes are bound to loopback alone"
    monkeypatch.setattr("lightning_proxy.serving.mode.has_gpu", lambda: True)
    monkeypatch.setattr("lightning_proxy.commands.vllm.has_gpu", lambda: True)
    full = program("auto", weights="full")
    assert "--enable-lora" not in full.argv and full.env["VLLM_SERVER_DEV_MODE"] == "1"
    module, _, name = option(full.argv, "--worker-extension-cls").rpartition(".")
    assert hasattr(getattr(import_module(module), name), RELOAD), "vLLM finds our method by these names"


def test_vllm_is_started_without_telemetry_unless_it_was_set(tmp_path: Path, model: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for directory in (package, *package.parents[:2]):
        (directory / "__init__.py").touch()
    (package / "api_server.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    asked = [sys.executable, "-m", "lightning_proxy.cli", "vllm", "--model", model]
    clean, given = {name: value for name, value in os.environ.items() if name not in OFF}, {"VLLM_NO_USAGE_STATS": "0"}
    env = clean | {"PYTHONPATH": str(tmp_path)} | given
    told = json.loads(subprocess.run(asked, cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=True).stdout)
    assert {name: told[name] for name in OFF} == OFF | given


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """A configuration for a model, on a machine with these GPUs: their files and what nvidia-smi would say."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)

    def make(name: str, gibs: list[float], **sections: Any) -> Config:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES[name]))
        (tmp_path / "nvidia0").touch()
        monkeypatch.setattr(mode, "DEVICES", tmp_path)
        monkeypatch.setattr(plan_module, "cards", lambda: dict(enumerate(gibs)))
        policy = {"model": str(tmp_path / "model"), "directory": tmp_path / "policy"}
        return Config.model_validate({"policy": policy, **sections})

    return make


def test_vllm_gets_its_gpus_and_its_share(on: Callable[..., Config]) -> None:
    program = vllm_program(on("Qwen3-4B", [24.0]))
    assert program.env["CUDA_VISIBLE_DEVICES"] == "0" and "--tensor-parallel-size" not in program.argv
    assert 0.4 < float(option(program.argv, "--gpu-memory-utilization")) < 0.6
    assert int(option(program.argv, "--max-model-len")) >= 4096
    program = vllm_program(on("Qwen3-32B", [80.0] * 8))
    assert program.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert option(program.argv, "--tensor-parallel-size") == "4"
    given = {"vllm": {"extra_args": ["--tensor-parallel-size", "2"], "devices": [0, 1]}}
    assert vllm_program(on("Qwen3-32B", [80.0] * 8, **given)).argv.count("--tensor-parallel-size") == 1


def test_the_trainer_sees_one_gpu_unless_a_launcher_shares_them_out_also_for_a_model_larger_than_one(
    on: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    async def look(config: Config, *_: object) -> None:
        seen.append((os.environ.get("CUDA_VISIBLE_DEVICES"), config.trainer.max_tokens_per_batch))

    monkeypatch.setattr(train_module, "_train", look)
    config = on("Qwen3-32B", [48.0] * 4)
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    train_module.train(config, Run())
    program = vllm_program(config, alone=True)
    assert program.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert float(option(program.argv, "--gpu-memory-utilization")) > 0.8
    assert seen == [(None, 8192)] and "does not fit" in caplog.text
    with pytest.raises(ConfigError, match="does not fit"):
        vllm_program(on("Qwen3-32B", [24.0]), alone=True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    train_module.train(on("Qwen3-8B", [24.0, 24.0]), Run())
    assert seen[1][0] == "1" and os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


async def test_up_refuses_what_cannot_fit_before_it_starts_anything(on: Callable[..., Config], tmp_path: Path) -> None:
    config = on("Qwen2.5-7B", [24.0], proxy={"port": 0})
    config = config.model_copy(update={"vllm": config.vllm.model_copy(update={"port": 8100})})
    with pytest.raises(ConfigError, match="does not fit"):
        async with running_system(config, Launch(None), tmp_path / "logs", lambda _: None, trains=True):
            pass
    assert not list((tmp_path / "logs").glob("*"))
    with pytest.raises(ConfigError, match="set both"):
        check_addresses(Config.model_validate({"vllm": {"port": 9}}))
    elsewhere = {"upstreams": [{"name": "policy", "base_url": "http://10.0.0.2:8100/v1"}]}
    for fits in (make_plan(config, offline=True), make_plan(on("Qwen2.5-7B", [24.0], **elsewhere))):
        assert fits.trainer_devices == (0,) and not fits.vllm, "the trainer has the card to itself"
        assert (fits.config.trainer.max_sample_tokens or 0) > 4096
