"""The command line from outside: one-line errors, what it imports, and the lines that `serve` writes."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.system import write_config
from lightning_proxy.commands.lines import MOST, CallLines, call_line
from lightning_proxy.commands.system.system import Launch
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.records import CallEnd, CallStart, RolloutName
from support.command_line import lightning
from support.models import save_small_model


def test_a_store_that_cannot_be_read_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text('proxy: {port: 0}\nstore: {url: "sqlite:///records.db"}\n')
    assert lightning("keys", "create", "somebody", cwd=tmp_path).returncode == 0
    with sqlite3.connect(tmp_path / "records.db") as db:
        db.execute("DROP TABLE keys")
    done = lightning("serve", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr == "lightning-proxy: the store cannot be read: no such table: keys\n"


def test_a_host_that_is_not_this_machine_is_named_in_place_of_the_port(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("proxy: {host: 192.0.2.1, api_keys: [k]}\n")
    done = lightning("serve", cwd=tmp_path)
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


def test_options_reach_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        Launch(None, {"policy.model": "a/b", "proxy.port": 9000, "trainer.max_steps": None}).env().items()
    ):
        monkeypatch.setenv(name, value)
    config = load_config()
    assert (config.policy.model, config.proxy.port, config.trainer.max_steps) == ("a/b", 9000, None)


OWN_LOSS = "import torch\ndef nothing(logprobs, results, config):\n    return torch.tensor(0.1) * results\n"


def test_a_loss_without_a_gradient_is_one_line_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    loss, model = f"{tmp_path / 'mine.py'}:nothing", save_small_model(tmp_path / "model")
    trainer = {"report_to": [], "context_loss": loss}
    write_config(tmp_path, "http://127.0.0.1:9/v1", 9, policy={"model": str(model)}, trainer=trainer)
    done = lightning("train", "--once", cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and f"trainer.context_loss {loss}: it has no gradient" in "".join(told)
    assert "Traceback" not in done.stderr and len(told) < 6, done.stderr


START = CallStart("c1", RolloutName("r1", "t1", key_id="k1"), "chat/completions", "policy", 3, {}, 0.0)


@pytest.mark.parametrize(("each", "ok"), [(True, MOST), (False, 0)])
async def test_calls_that_fail_have_lines_however_many_do_not(
    caplog: pytest.LogCaptureFixture, each: bool, ok: int
) -> None:
    caplog.set_level(logging.INFO, "lightning_proxy.serving")
    lines = CallLines(each=each)
    for status in ["ok"] * 2 * MOST + ["error"]:
        lines.call_ended(START, CallEnd("c1", "r1", status, {}, 200, (), latency_ms=1.0), {})
    lines.flush()
    assert [message.split()[0] for message in caplog.messages] == ["ok"] * ok + ["error", "21"]


@pytest.mark.parametrize("said", [{"error": {"message": "too long"}}, {"message": "too long"}, "too long"])
def test_a_refused_calls_line_has_the_upstreams_reason_without_secrets(said: Any) -> None:
    end = CallEnd("c1", "r1", "error", said, 400, (), error="the upstream answered 400", latency_ms=1200.0)
    assert call_line(START, end, lambda text: text.replace("long", "***")) == (
        "error     chat/completions  rollout r1  task t1  key k1  version 3  1.2s  HTTP 400: too ***"
    )
