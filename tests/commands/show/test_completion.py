"""A shell completes what the running proxy knows."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

Running = Callable[..., AbstractAsyncContextManager[Any]]


# What bash asks for each line, in one process.
ASK = """
import contextlib, os, sys
from lightning_proxy.cli import app
for line in sys.argv[1:]:
    asked = {"_LIGHTNING_PROXY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    os.environ.update(asked)
    with contextlib.suppress(SystemExit):
        app(prog_name="lightning-proxy")
    print("--")
"""


def completed(config: Path, *lines: str) -> list[set[str]]:
    command = [sys.executable, "-c", ASK, *(f"lightning-proxy --config {config} {line}" for line in lines)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    return [set(one.split()) for one in done.stdout.split("--\n")[:-1]]


async def test_ids_tasks_versions_and_prompts_are_completed_and_nothing_once_the_proxy_is_gone(
    running: Running, tmp_path: Path
) -> None:
    wanted = {
        "rollouts show roll": {"rollout-1", "rollout-2"},
        "rollouts list --task su": {"sums", "sums-2"},
        "policy promote ": {"0"},
        "prompts show s": {"short"},
    }
    async with running(tmp_path) as system:
        await system.chat("rollout-1", X_Task_Id="sums")
        await system.chat("rollout-2", X_Task_Id="sums-2")
        await system.chat("other", X_Task_Id="else")
        await system.call("POST", "/prompts", {"name": "short", "text": "Be short."})
        await system.lightning("policy", "list")
        config = system.vllm.root / "system.yaml"
        assert await asyncio.to_thread(completed, config, *wanted) == list(wanted.values())
    assert completed(config, "rollouts show roll") == [set()]
