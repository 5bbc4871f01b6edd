"""The agents of `examples/`, each with its teacher behind the proxy: what `examples/learn.py` records first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.clients import command_for
from support.examples import EXAMPLES, IN_FRAMEWORKS, played_by_teacher

TASKS = 24

pytestmark = pytest.mark.timeout(900)  # on a machine that has to bring the packages first


@pytest.mark.parametrize("name", IN_FRAMEWORKS)
async def test_an_example_with_its_teacher(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = command_for(EXAMPLES / name / "agent.py")[0]
    rollouts = await played_by_teacher(name, python, TASKS, tmp_path, monkeypatch)
    rewards = [rollout["reward"] for rollout in rollouts]
    assert len(rewards) == TASKS
    assert 0.3 < sum(rewards) / TASKS < 0.95
    calls = [call for rollout in rollouts for call in rollout["calls"]]
    assert len(calls) >= TASKS
    assert {call["status"] for call in calls} == {"ok"}


@pytest.mark.vllm
@pytest.mark.parametrize("example", ["calculator", "reverse_text"])
def test_a_lesson_on_a_real_vllm(tmp_path: Path, example: str) -> None:
    """Too short to learn much: every stage is there, and the versions are those that it made."""
    command = [sys.executable, EXAMPLES / "learn.py", example, "--dir", tmp_path]
    short = ["--imitate", "48", "--steps", "1", "--samples", "1"]
    done = subprocess.run([*command, *short], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (lesson,) = json.loads((tmp_path / "results.json").read_text())
    assert {name: row["failed"] for name, row in lesson["held_out"].items()} == {"base": 0, "sft": 0, "rl": 0}
    assert lesson["held_out"]["base"]["policy_versions"] == [0]
    assert lesson["held_out"]["sft"]["policy_versions"] == [1]
    assert lesson["held_out"]["rl"]["policy_versions"] == [2]
    assert len(lesson["steps"]) == 1
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
