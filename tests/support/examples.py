"""The modules of an example, which are told apart by their directory alone, and its rollouts with its teacher."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from traffic.server import config_of

from contract.system import wait_until
from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.run import RunOptions, run_tasks
from lightning_proxy.commands.run.runner import LocalRunner
from lightning_proxy.commands.run.tasks import read_tasks
from lightning_proxy.commands.system.processes import free_port
from lightning_proxy.core.config.upstreams import UpstreamConfig
from support.paths import EXAMPLES
from support.served import proxy_of
from support.twice import get

NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/teacher.py"))
# Their agents need packages of their own.
IN_FRAMEWORKS = [name for name in NAMES if (EXAMPLES / name / "agent.py").read_text().startswith("# /// script")]


@cache
def modules(example: str) -> SimpleNamespace:
    """All of an example, but an agent that needs its framework; others have modules of the same names."""
    own, framework = EXAMPLES / example, {"agent"} if example in IN_FRAMEWORKS else set()
    names, paths = {path.stem for path in own.glob("*.py")} - framework, [str(own), str(EXAMPLES)]
    sys.path[:0] = paths
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        for path in paths:
            sys.path.remove(path)
        for name in names:
            sys.modules.pop(name, None)


async def played_by_teacher(
    name: str, python: str, number: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Rollouts of an example behind a proxy, with its teacher as the model; none of their programs failed."""
    train, _ = modules(name).tasks.split(0, number, 1)
    path = directory / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in train))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES / name))
    monkeypatch.setenv("MODEL", "teacher")
    preload = yaml.safe_load((EXAMPLES / name / "example.yaml").read_text())["preload"]
    runner = LocalRunner([python, str(EXAMPLES / "play.py")], preload)
    with teaching(path) as base_url:
        config = config_of("http://127.0.0.1:9", directory)
        config.upstreams.append(UpstreamConfig(name="teacher", kind="openai", base_url=base_url, models=["teacher"]))
        async with proxy_of(config) as url, ApiClient(url) as api:
            results = await run_tasks(api, read_tasks(path), runner, RunOptions(concurrency=4))
            await runner.close()
            assert [result.reason for result in results if result.failed] == []
            return [await api.rollout(result.rollout_id) for result in results]


@contextmanager
def teaching(tasks: Path) -> Iterator[str]:
    """Yields the base URL of a teacher, in a process of its own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with subprocess.Popen([sys.executable, EXAMPLES / "teach.py", str(port), tasks]) as server:
        try:
            wait_until(lambda: get(f"{url}/models"), 60, "the teacher is there")
            yield url
        finally:
            server.terminate()
