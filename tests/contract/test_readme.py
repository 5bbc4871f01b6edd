"""The README's five steps, word for word, are enough to train and to measure what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract.system import free_port, wait_until
from support.models import save_spelling_model
from support.paths import EXAMPLES, ROOT

FIVE = (ROOT / "README.md").read_text().partition("## Five steps")[2].partition("\n## ")[0]
STEPS = re.split(r"^\*\*\d\. ", FIVE, flags=re.MULTILINE)[1:]
ADDITION = EXAMPLES / "addition"
MODEL = "~/.cache/lightning-proxy/SmolLM2-135M-Instruct"


def commands(step: int) -> list[str]:
    """What is to be typed in it."""
    return re.findall(r"^\$ (.+)$", STEPS[step - 1], re.M)


def tasks(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ADDITION / name).read_text().splitlines()]


def test_the_agent_that_is_shown_is_the_one_that_runs() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", STEPS[2], re.S)
    assert shown == (ADDITION / "agent.py").read_text()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_its_steps_train_and_measure_the_base_model_and_the_trained_one(tmp_path: Path) -> None:
    """Their small form: a tiny model, one pass over 8 tasks, two held-out ones."""
    place = tmp_path / "examples" / "addition"
    shutil.copytree(ADDITION, place)
    for name, lines in (("tasks.jsonl", 8), ("held_out.jsonl", 2)):
        kept = (place / name).read_text().splitlines(keepends=True)[:lines]
        (place / name).write_text("".join(kept))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    model, ports = save_spelling_model(tmp_path / "model", letters="0123456789+="), (free_port(), free_port())
    env = os.environ | {
        "LIGHTNING_PROXY__PORT": str(ports[0]), "LIGHTNING_VLLM__PORT": str(ports[1]),
        "LIGHTNING_UPSTREAMS": json.dumps([{"name": "policy", "base_url": f"http://127.0.0.1:{ports[1]}/v1"}]),
        "LIGHTNING_VLLM__MAX_MODEL_LEN": "256", "LIGHTNING_VLLM__KV_CACHE_GIB": "1",
    }  # fmt: skip

    def typed(lines: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Typed into a shell at the root of a checkout."""
        script = "\n".join(["set -e", ". .venv/bin/activate", *lines]).replace(MODEL, str(model))
        with log.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-c", script], cwd=tmp_path, env=env, stdout=file, stderr=file, start_new_session=True
            )

    first, second = tmp_path / "first.log", tmp_path / "second.log"
    system = typed(commands(2), first)
    try:
        wait_until(
            lambda: system.poll() is not None or "ready: OPENAI_BASE_URL" in first.read_text(), 480, "it is ready"
        )
        once = [re.sub(r"--repeat \d+", "--repeat 1", line) for line in commands(4)]
        assert typed(once, second).wait(300) == 0, second.read_text()
        assert re.search(r"^64 rollouts, mean reward 0\.\d+, 0 failed", second.read_text(), re.M), second.read_text()
        wait_until(lambda: system.poll() is not None or "version 1" in first.read_text(), 300, "version 1 is live")
        assert typed([commands(4)[0], *commands(5)], second).wait(300) == 0, second.read_text()
        interval = r"\d+ % \(\d+ to \d+\)"
        assert re.search(rf"^0 .* {interval}", second.read_text(), re.M), second.read_text()
        assert re.search(rf"^live \(1\) .* {interval}", second.read_text(), re.M), second.read_text()
    finally:
        os.killpg(system.pid, signal.SIGINT)
        system.wait(60)
