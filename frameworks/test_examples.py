"""Agents of `examples/` behind the proxy, each with its teacher, and one that Agent Lightning publishes."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
from pyarrow import Table, parquet

from contract.system import in_this_process
from contract.vllm import PlayedVllm
from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.run import RunOptions, run_tasks
from lightning_proxy.commands.run.runner import LocalRunner
from lightning_proxy.commands.run.tasks import read_tasks
from support.clients import ENVIRONMENTS, command_for
from support.examples import EXAMPLES, IN_FRAMEWORKS, played_by_teacher

TASKS = 24
RELEASE = "agentlightning-1.0.2"
AGENT = "examples.gsm8k.gsm8k_agent.ChatAgent"

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
def test_a_lesson_on_a_real_vllm(tmp_path: Path) -> None:
    """Too short to learn much: every stage is there, and the versions are those that it made."""
    command = [sys.executable, EXAMPLES / "learn.py", "calculator", "--dir", tmp_path]
    short = ["--imitate", "48", "--steps", "1", "--samples", "1"]
    done = subprocess.run([*command, *short], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (lesson,) = json.loads((tmp_path / "results.json").read_text())
    rows = {name: (row["failed"], row["policy_versions"]) for name, row in lesson["held_out"].items()}
    assert rows == {"base": (0, [0]), "sft": (0, [1]), "rl": (0, [2])}
    assert len(lesson["steps"]) == 1
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Its source, which alone has the examples. It wants a newer Python than they do."""
    archive = ENVIRONMENTS / f"{RELEASE}.tar.gz"
    if not archive.exists():
        venv.create(tmp_path / "pip", with_pip=True)
        options = ["--no-deps", "--ignore-requires-python", "--no-binary", "agentlightning", "--dest", archive.parent]
        pip = [tmp_path / "pip/bin/python", "-m", "pip", "download", "--quiet", *options]
        subprocess.run([*pip, RELEASE.replace("-", "==")], check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / RELEASE


async def test_its_example_runs_and_is_rewarded(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(release))
    rows = [{"question": "1 + 1?", "answer": "so\n#### 2"}, {"question": "1 + 2?", "answer": "#### 3"}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "train.parquet")
    agent = [sys.executable, "-m", "lightning_proxy.client.agl", AGENT]
    runner = LocalRunner([*agent, "QUESTION=input.question", "ANSWER=input.answer"])
    vllm = PlayedVllm(tmp_path)
    vllm.answer = lambda _: {"role": "assistant", "content": "### ANSWER: 2 ###"}
    with in_this_process(tmp_path, vllm, policy={"alias": "auto"}) as proxy:
        async with ApiClient(proxy.url) as api:
            results = await run_tasks(api, read_tasks(tmp_path / "train.parquet"), runner, RunOptions(concurrency=2))
            await runner.close()
            rollouts = [await api.rollout(result.rollout_id) for result in results]
    assert [(result.reason, result.calls) for result in results] == [(None, 1)] * 2
    assert sorted(rollout["reward"] for rollout in rollouts) == [0, 1]
    assert {rollout["status"] for rollout in rollouts} == {"completed"}
