"""`status --watch`, as a process of its own: lines in a pipe, JSON for programs, and a proxy that comes and goes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Running = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["lines", "json"])
async def test_the_state_is_told_as_it_changes(running: Running, tmp_path: Path, options: list[str]) -> None:
    async with running(tmp_path) as system:
        path = tmp_path / "here.yaml"
        path.write_text(f"proxy: {{port: {system.url.rsplit(':', 1)[1]}}}\n")
        command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(path), "status", "--watch", *options]
        watch = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        assert watch.stdout is not None
        try:
            first = (await watch.stdout.readline()).decode()
            await system.chat("r1")
            while "1 rollouts" not in (line := (await watch.stdout.readline()).decode()) and '"running": 1' not in line:
                assert line, "it ended"
        finally:
            watch.send_signal(signal.SIGINT)
            _, err = await watch.communicate()
    assert (watch.returncode, err) == (0, b"")
    if options:
        assert json.loads(first)["ready"]["store"] == "ok"
    else:
        assert first.split(" ", 1)[1].startswith("ready, version 0, 0 rollouts, 0 wait"), first


async def test_a_proxy_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("proxy: {port: 9}\n")
    command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(tmp_path / "c.yaml"), "status", "-w"]
    watch = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    assert watch.stdout is not None
    assert b"no proxy answers at http://127.0.0.1:9" in await watch.stdout.readline()
    watch.send_signal(signal.SIGTERM)
    assert await watch.wait() == 0
