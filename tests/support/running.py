"""Runs programs over tasks, against a control API."""

from __future__ import annotations

import json

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.run import RolloutResult, RunOptions, run_tasks
from lightning_proxy.commands.run.runner import Runner
from lightning_proxy.commands.run.tasks import Task

from .control_api import ControlApi


async def run_all(proxy: ControlApi, runner: Runner, tasks: list[Task], options: RunOptions) -> list[RolloutResult]:
    async with ApiClient(proxy.url) as api:
        try:
            return await run_tasks(api, tasks, runner, options)
        finally:
            await runner.close()


def task(x: int) -> Task:
    return Task(f"t{x}", json.dumps({"x": x}))
