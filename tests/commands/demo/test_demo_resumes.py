"""A demo that is killed goes on where it was, in front of a real vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract.system import CLI, wait_until
from support.models import save_spelling_model

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1500)]

STEPS = 3


def start(directory: Path, *options: str) -> subprocess.Popen[bytes]:
    with (directory / "out.log").open("ab") as log:
        command = [*CLI, "demo", "--dir", str(directory / "demo"), *options]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, start_new_session=True)


def policy(demo: Path) -> dict[str, Any]:
    try:
        port = yaml.safe_load((demo / "config.yaml").read_text())["proxy"]["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/policy", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, TypeError):
        return {}


def test_a_killed_demo_goes_on_where_it_was(tmp_path: Path) -> None:
    model, demo, log = save_spelling_model(tmp_path / "model", letters="0123456789ab"), tmp_path / "demo", "out.log"
    first = start(tmp_path, "--model", str(model), "--steps", str(STEPS))
    try:
        wait_until(lambda: first.poll() is not None or policy(demo).get("live_version"), 480, "a version is live")
        before = (demo / "before.json").read_text()
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert not (demo / "result.json").exists(), (tmp_path / log).read_text()
    (tmp_path / log).write_text("")

    again = start(tmp_path, "--resume")
    try:
        assert again.wait(900) == 0, (tmp_path / log).read_text()
    finally:
        again.kill()
    result = json.loads((demo / "result.json").read_text())
    assert result["steps_taken"] == len(result["steps"]) == STEPS
    assert result["held_out"]["before"]["mean_reward"] == json.loads(before)["rows"][0]["mean_reward"]
    assert (tmp_path / log).read_text().count("the held-out tasks are evaluated") == 1
