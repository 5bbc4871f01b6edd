"""The command line from outside: exit codes, one-line errors, what it starts."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lightning_proxy.commands.system.processes import free_port
from lightning_proxy.commands.system.system import Launch
from lightning_proxy.commands.vllm import served_model, vllm_program
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.serving.vllm_worker import RELOAD
from support.command_line import lightning


def in_a_process(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_proxy.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def policy(model: Path | str, **more: object) -> Config:
    return Config.model_validate({"policy": {"model": str(model), **more}})


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_store_that_cannot_be_read_is_one_line_without_a_traceback(tmp_path: Path, workers: int) -> None:
    settings = {"proxy": {"port": 0, "workers": workers}, "store": {"url": "sqlite:///records.db"}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    assert lightning("keys", "create", "somebody", cwd=tmp_path).returncode == 0
    with sqlite3.connect(tmp_path / "records.db") as db:
        db.execute("DROP TABLE keys")
    done = in_a_process("serve", cwd=tmp_path)
    told = "lightning-proxy: the store cannot be read: no such table: keys"
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and told in done.stderr.splitlines()
    assert workers > 1 or done.stderr.splitlines() == [told]


def test_a_host_that_is_not_this_machine_is_named_in_place_of_the_port(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("proxy: {host: 192.0.2.1, api_keys: [k]}\n")
    done = in_a_process("serve", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.endswith("choose another proxy.host\n")


# What a command line that only parses has no use for, and what only the proxy and the trainer have.
HEAVY = ("torch", "transformers", "vllm", "litellm", "numpy", "fastapi", "starlette", "uvicorn", "aiosqlite", "asyncpg")
PARSED = (*HEAVY, "aiohttp", "asyncio", "rich", "yaml", "lightning_proxy.core.config")


COMPLETION = {"_LIGHTNING_PROXY_COMPLETE": "complete_bash", "COMP_WORDS": "lightning-proxy ru", "COMP_CWORD": "1"}


@pytest.mark.parametrize(
    ("argv", "env", "unneeded"),
    [
        (["--help"], {}, (*PARSED, "pydantic")),
        (["run", "--help"], {}, PARSED),  # once an option is parsed, typer itself imports pydantic
        ([], COMPLETION, PARSED),
        (["status"], {"LIGHTNING_PROXY__PORT": "1"}, (*HEAVY, "lightning_proxy.store")),
    ],
    ids=("help", "run", "completion", "status"),
)
def test_a_command_imports_only_what_it_uses(
    tmp_path: Path, argv: list[str], env: dict[str, str], unneeded: tuple[str, ...]
) -> None:
    look = (
        "import atexit, sys; from lightning_proxy.cli import app; "
        f"atexit.register(lambda: print('loaded', [m for m in {unneeded} if m in sys.modules])); "
        f"app({argv}, prog_name='lightning-proxy')"
    )
    env = os.environ | env
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout.endswith("loaded []\n"), done


def test_vllm_is_started_as_proxy_and_trainer_need_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = vllm_program(policy(model, publish="merged"))
    assert "--enable-lora" not in merged.argv and merged.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert option(merged.argv, "--host") == "127.0.0.1", "its operator routes are open"
    assert "--enable-scale-out" in merged.argv, "the routes between messages and tokens"
    assert option(merged.argv, "--logprobs-mode") == "processed_logprobs", "those after temperature"
    trained = {"policy": {"model": str(model), "publish": "lora"}, "trainer": {"lora_rank": 12}}
    lora = vllm_program(Config.model_validate(trained))
    assert "--enable-lora" in lora.argv and lora.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert option(lora.argv, "--max-lora-rank") == "16", "a rank that vLLM has"
    assert option(lora.argv, "--host") == "127.0.0.1", "operator routes are bound to loopback alone"
    monkeypatch.setattr("lightning_proxy.serving.mode.has_gpu", lambda: True)
    monkeypatch.setattr("lightning_proxy.commands.vllm.has_gpu", lambda: True)
    full = vllm_program(Config.model_validate({"policy": {"model": str(model)}, "trainer": {"weights": "full"}}))
    assert "--enable-lora" not in full.argv and full.env["VLLM_SERVER_DEV_MODE"] == "1"
    module, _, name = option(full.argv, "--worker-extension-cls").rpartition(".")
    assert hasattr(getattr(import_module(module), name), RELOAD), "vLLM finds our method by these names"


def test_a_model_directory_is_served_under_its_name_and_an_id_under_itself(model: Path) -> None:
    assert served_model(policy(model)) == "tiny-model"
    assert served_model(policy("org/name")) == "org/name"


def test_options_reach_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(None, {"policy.model": "a/b", "proxy.port": 9000, "trainer.max_steps": None})
    for name, value in launch.env().items():
        monkeypatch.setenv(name, value)
    config = load_config()
    assert (config.policy.model, config.proxy.port, config.trainer.max_steps) == ("a/b", 9000, None)


def test_logs_of_up_that_cannot_be_written_are_one_line_and_code_2(tmp_path: Path, model: Path) -> None:
    port, vllm = free_port(), free_port()
    upstream = {"name": "policy", "base_url": f"http://127.0.0.1:{vllm}/v1"}
    settings = {"proxy": {"port": port}, "vllm": {"port": vllm}, "upstreams": [upstream]}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    done = in_a_process("up", "--model", model, "--logs", "config.yaml", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "--logs: cannot create the directory config.yaml" in done.stderr
