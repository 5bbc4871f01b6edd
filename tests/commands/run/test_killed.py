"""A program that runs for too long is ended, and one whose `run` was killed; the rollouts have failed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.run.run import RunOptions
from support.control_api import ControlApi
from support.paths import ROOT
from support.running import Program, run_all, task

Running = Callable[..., AbstractAsyncContextManager[Any]]

# Starts a child, and one that leaves it for a session of its own; says who is there.
HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
left = os.popen("setsid sleep 1000 >/dev/null 2>&1 & echo $!").read().strip()
with open({pids!r}, "a") as file:
    file.write(f"{{os.getpid()}} {{child.pid}} {{left}}\\n")
print("hanging", flush=True)
time.sleep(1000)
"""


async def are_gone(pids: Path) -> None:
    for pid in pids.read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):
            while "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                await asyncio.sleep(0.02)


async def test_a_program_that_hangs_is_ended_with_its_group_and_its_slot_is_free(
    proxy: ControlApi, tmp_path: Path, program: Program
) -> None:
    pids, once = tmp_path / "pids", tmp_path / "once"
    text = f"import os\nif not os.path.exists({str(once)!r}):\n    open({str(once)!r}, 'w').close()\n"
    text += "".join(f"    {line}\n" for line in HANGS.format(pids=str(pids)).strip().splitlines())
    options = RunOptions(group_size=2, concurrency=1, timeout_s=3.0, logs=tmp_path / "logs")
    late, well = await run_all(proxy, program(tmp_path, text), [task(1)], options)
    assert (late.exit_code, late.failed, well.exit_code) == (124, True, 0)
    assert late.reason == "ended after 3 s (run.timeout_s): hanging"
    assert (proxy.rollouts["r0"]["status"], proxy.rollouts["r0"]["reason"]) == ("failed", late.reason)
    await are_gone(pids)


@pytest.mark.parametrize("program", ["process", pytest.param("preload", marks=pytest.mark.long)], indirect=True)
async def test_sigterm_comes_first_and_sigkill_to_whoever_stays(
    proxy: ControlApi, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    text = f"""
import signal, sys, time
def late(*_):
    with open({str(told)!r}, "a") as file:
        file.write("SIGTERM ")
    if sys.argv[1] == "ends":
        sys.exit(0)
signal.signal(signal.SIGTERM, late)
while True:
    time.sleep(0.1)
"""
    for how in ("ends", "stays"):
        (late,) = await run_all(proxy, program(tmp_path, text, how), [task(1)], RunOptions(timeout_s=2.0))
        assert late.exit_code == 124
    assert told.read_text() == "SIGTERM SIGTERM "


@pytest.mark.parametrize("options", [(), ("--preload", "json")], ids=["process", "preload"])
async def test_programs_end_with_a_killed_run_and_the_next_one_fails_its_rollouts(
    running: Running, tmp_path: Path, options: tuple[str, ...]
) -> None:
    tasks, agent, pids = tmp_path / "tasks.jsonl", tmp_path / "agent.py", tmp_path / "pids"
    tasks.write_text('{"task_id": "t1"}\n')
    agent.write_text(HANGS.format(pids=str(pids)))
    async with running(tmp_path) as system:
        asked = ["--tasks", str(tasks), "--group-size", "2", *options, "--", sys.executable]
        env = os.environ | {"PYTHONPATH": str(ROOT.parent), "LIGHTNING_PROXY__PORT": system.url.rpartition(":")[2]}
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lightning_proxy", "run", *asked, str(agent), env=env, start_new_session=True
        )
        while not pids.exists() or pids.read_text().count("\n") < 2:
            await asyncio.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
        await run.wait()
        await are_gone(pids)
        _, page = await system.call("GET", "/rollouts?status=running")
        assert len(page["data"]) == 2
        agent.write_text("pass")
        code, _, err = await system.lightning("run", *asked, str(agent))
        assert (code, "2 rollouts of a run that was killed have failed" in " ".join(err.split())) == (0, True), err
        _, page = await system.call("GET", "/rollouts?status=failed")
        assert [one["reason"] for one in page["data"]] == ["its `run` was killed"] * 2
        _, _, err = await system.lightning("run", *asked, str(agent))
        assert "was killed" not in err


async def test_what_a_program_leaves_behind_ends_with_it(proxy: ControlApi, tmp_path: Path, program: Program) -> None:
    pids = tmp_path / "pids"
    text = HANGS.format(pids=str(pids)).replace("\ntime.sleep(1000)\n", "\n")
    (result,) = await run_all(proxy, program(tmp_path, text), [task(1)], RunOptions())
    assert result.reason is None
    await are_gone(pids)
