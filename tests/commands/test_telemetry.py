"""Nobody is told of what runs here, unless the user wants it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_proxy.commands.command_line import OFF

TELLS_ITS_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize("given", [{}, {"VLLM_NO_USAGE_STATS": "0"}])
def test_vllm_is_started_without_telemetry_unless_it_was_set(tmp_path: Path, given: dict[str, str]) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for directory in (package, *package.parents[:2]):
        (directory / "__init__.py").touch()
    (package / "api_server.py").write_text(TELLS_ITS_ENVIRONMENT)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    asked = [sys.executable, "-m", "lightning_proxy.cli", "vllm", "--model", "model"]
    clean = {name: value for name, value in os.environ.items() if name not in OFF}
    env = clean | {"PYTHONPATH": str(tmp_path)} | given
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {name: told[name] for name in OFF} == OFF | given
