"""The proxy's control API, as `run` sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from contract.system import listening
from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.run import RolloutResult, RunOptions, run_tasks
from lightning_proxy.commands.run.runner import Runner, runner_for
from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.core.config.root import Config


@dataclass
class Program:
    """A way of running programs. `settings`: the configuration."""

    kind: str
    settings: dict[str, Any]

    def __call__(self, directory: Path, text: str) -> Runner:
        script = directory / "agent.py"
        script.write_text(text)
        return runner_for(Config.model_validate(self.settings), [sys.executable, str(script)], [], print)


async def run_all(proxy: ControlApi, runner: Runner, tasks: list[Task], options: RunOptions) -> list[RolloutResult]:
    async with ApiClient(proxy.url) as api:
        try:
            return await run_tasks(api, tasks, runner, options)
        finally:
            await runner.close()


def task(x: int) -> Task:
    return Task(f"t{x}", json.dumps({"x": x}))


class ControlApi:
    """A control API that keeps rollouts in memory."""

    def __init__(self) -> None:
        self.rollouts: dict[str, dict[str, object]] = {}
        self.url = ""
        self.away, self.away_status = 0, 503  # requests to refuse, and how

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/rollouts", self.open)
        app.router.add_get("/rollouts/{name}", self.get)
        app.router.add_post("/rollouts/{name}/end", self.end)
        return app

    async def open(self, request: web.Request) -> web.Response:
        body = await request.json()
        names = [f"r{len(self.rollouts) + i}" for i in range(body["n"])]
        opened = {"task_id": body["task_id"], "mode": body["mode"], "status": "running", "reward": None}
        self.rollouts |= {name: opened | {"rollout_id": name} for name in names}
        base = f"{self.url}/rollouts"
        return web.json_response([{"rollout_id": n, "base_url": f"{base}/{n}/v1", "api_key": f"k-{n}"} for n in names])

    async def get(self, request: web.Request) -> web.Response:
        if self.away > 0:
            self.away -= 1
            return web.json_response({"error": {"message": "away"}}, status=self.away_status)
        return web.json_response(self.rollouts[request.match_info["name"]])

    async def end(self, request: web.Request) -> web.Response:
        rollout = self.rollouts[request.match_info["name"]]
        rollout.update(await request.json())
        return web.json_response(rollout)


@asynccontextmanager
async def served() -> AsyncIterator[ControlApi]:
    """Serve the played control API on a free port of the loopback interface."""
    api = ControlApi()
    async with listening(api.app()) as api.url:
        yield api
