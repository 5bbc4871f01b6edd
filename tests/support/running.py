"""Makes runners of Python programs, and runs them over tasks."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.run import RolloutResult, RunOptions, run_tasks
from lightning_proxy.commands.run.runner import Runner, runner_for
from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.core.config.root import Config

from .control_api import ControlApi


@dataclass
class Program:
    """A way of running programs. `said`: what a person was told."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)  # the configuration
    said: list[str] = field(default_factory=list)

    def __call__(self, directory: Path, text: str, *arguments: str) -> Runner:
        script = directory / "agent.py"
        script.write_text(text)
        return self.command(sys.executable, str(script), *arguments)

    def command(self, *command: str) -> Runner:
        config = Config.model_validate(self.settings)
        return runner_for(config, command, ["json"] if self.kind == "preload" else [], self.said.append)


async def run_all(proxy: ControlApi, runner: Runner, tasks: list[Task], options: RunOptions) -> list[RolloutResult]:
    async with ApiClient(proxy.url) as api:
        try:
            return await run_tasks(api, tasks, runner, options)
        finally:
            await runner.close()


def task(x: int) -> Task:
    return Task(f"t{x}", json.dumps({"x": x}))
