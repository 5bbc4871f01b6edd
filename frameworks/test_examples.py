"""The agents of `examples/`, each with its teacher behind the proxy: what `examples/learn.py` records first."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from traffic.server import config_of

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.programs import PreloadRunner
from lightning_proxy.commands.run.run import RunOptions, run_tasks
from lightning_proxy.commands.run.tasks import read_tasks
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from support.environments import command_for
from support.examples import EXAMPLES, NAMES, modules
from support.in_process import proxy_of

TASKS = 24

pytestmark = pytest.mark.timeout(900)  # on a machine that has to bring the packages first


@pytest.mark.parametrize("name", NAMES)
async def test_an_example_with_its_teacher(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _ = modules(name).tasks.split(0, TASKS, 1)
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in train))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES / name))
    monkeypatch.setenv("MODEL", "teacher")
    python = command_for(EXAMPLES / name / "agent.py")[0]
    preload = yaml.safe_load((EXAMPLES / name / "example.yaml").read_text())["preload"]
    runner = PreloadRunner([python, str(EXAMPLES / "play.py")], preload)
    with teaching(path) as base_url:
        config = config_of("http://127.0.0.1:9", tmp_path)
        config.upstreams.append(UpstreamConfig(name="teacher", kind="openai", base_url=base_url, models=["teacher"]))
        async with proxy_of(config) as url, ApiClient(url) as api:
            results = await run_tasks(api, read_tasks(path), runner, RunOptions(concurrency=4))
            await runner.close()
            rollouts = [await api.rollout(result.rollout_id) for result in results]

    assert [result.reason for result in results if result.failed] == []
    rewards = [result.reward for result in results if result.reward is not None]
    assert len(rewards) == TASKS
    assert 0.3 < sum(rewards) / TASKS < 0.95
    calls = [call for rollout in rollouts for call in rollout["calls"]]
    assert len(calls) > TASKS
    assert {call["status"] for call in calls} == {"ok"}


@pytest.mark.vllm
def test_a_lesson_on_a_real_vllm(tmp_path: Path) -> None:
    """Too short to learn much: every stage is there, and the versions are those that it made."""
    command = [sys.executable, EXAMPLES / "learn.py", "calculator", "--dir", tmp_path]
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


@pytest.mark.vllm
def test_the_first_hour_on_a_gpu_runs_small_without_one(tmp_path: Path) -> None:
    """Both lessons; nothing is claimed of what one step teaches."""
    command = [sys.executable, EXAMPLES.parent / "benchmarks" / "gpu_hour.py", "--small", "--dir", tmp_path]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert [(run["example"], run["steps"], len(run["curve"])) for run in runs] == [
        ("reverse_text", 1, 1), ("calculator", 1, 1)
    ]  # fmt: skip
    assert all(run["sampled_tokens_per_s"] > 0 and run["step_s"] >= run["training_s"] for run in runs)


@contextmanager
def teaching(tasks: Path) -> Iterator[str]:
    """Yields the base URL of a teacher, in a process of its own."""
    port = free_port()
    with subprocess.Popen([sys.executable, EXAMPLES / "teach.py", str(port), tasks]) as server:
        try:
            while not answers(f"http://127.0.0.1:{port}/v1/models"):
                assert server.poll() is None
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
