"""An experiment in front of a real vLLM: two variants of SmolLM2-135M, the demo's tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.system import CLI
from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from support.paths import EXAMPLES

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

CONFIG = """
policy: {{model: {model}}}
vllm: {{max_model_len: 512, kv_cache_gib: 1}}
trainer: {{group_size: 8, tasks_per_step: 2, report_to: []}}
"""
FILE = """
agent: {python} {addition}/demo_agent.py
tasks: tasks/train.jsonl
held_out: tasks/held_out.jsonl
samples: 1
concurrency: 16
preload: openai
"""


def test_two_variants_train_on_equally_many_rollouts_and_one_for_its_minutes(tmp_path: Path) -> None:
    def compare(*more: str) -> list[list[str]]:
        """Run the experiment; return the words of its table."""
        file = FILE.format(python=sys.executable, addition=EXAMPLES / "addition")
        (tmp_path / "compare.yaml").write_text(file + "\n".join(more))
        command = [*CLI, "experiment", "compare.yaml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=3000)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    def results(variant: str) -> list[Any]:
        return [json.loads(file.read_text()) for file in tmp_path.glob(f"*/compare/{variant}/*/result.json")]

    (tmp_path / "config.yaml").write_text(CONFIG.format(model=prepare_model(cache_directory())))
    tasks = [sys.executable, str(EXAMPLES / "addition" / "tasks.py"), "tasks", "--held-out", "4"]
    subprocess.run(tasks, cwd=tmp_path, check=True)
    variants = "variants: {slow: {trainer: {learning_rate: 1.0e-5}}, fast: {}}"
    _, *rows, few_seeds = compare("rollouts: 16", "seeds: [1]", variants)
    assert [row[:2] for row in rows] == [["slow", "1"], ["fast", "1"]] and few_seeds[0] == "fewer"
    runs = results("slow") + results("fast")
    assert [run["rollouts"] for run in runs] == [16] * 2
    for run in runs:
        before, after = (run["held_out"][when] for when in ("before", "after"))
        assert before["policy_versions"] == [0] and after["policy_versions"] == [run["version"]]
        assert before["by_task"].keys() == after["by_task"].keys() and len(before["by_task"]) == 4
    compare("minutes: 0.5", "seeds: [1]", "variants: {timed: {}}")
    (timed,) = results("timed")
    assert timed["rollouts"] > 0
