"""The README's five steps, word for word, are enough for a training step."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from lightning_proxy.commands.run.tasks import read_tasks
from support.paths import ROOT
from support.sections import TrainerConfig

README = (ROOT / "README.md").read_text()


def test_the_environment_is_made_before_it_is_used() -> None:
    steps = README.partition("## Five steps")[2]
    assert 0 < steps.index("$ make setup\n") < steps.index("$ . .venv/bin/activate\n")


def test_its_command_writes_as_many_tasks_as_a_step_takes(tmp_path: Path) -> None:
    (command,) = re.findall(r"```sh\n(for .*?)```", README, re.S)
    for shell in ("sh", "bash"):
        subprocess.run([shell, "-c", command], cwd=tmp_path, check=True, timeout=30)
        tasks = read_tasks(tmp_path / "tasks.jsonl")
        assert len({task.task_id for task in tasks}) == len(tasks) >= TrainerConfig().tasks_per_step
    rollouts = len(tasks) * TrainerConfig().group_size
    assert f"\n{rollouts} rollouts, mean reward" in README  # what the next step shows
