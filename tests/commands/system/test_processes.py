"""The supervisor: health, order, Ctrl-C, deaths, and no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_proxy.commands.signals import Interrupted, run_until_signal
from lightning_proxy.commands.system import processes
from lightning_proxy.commands.system.processes import ChildDied, ChildSpec, Supervisor, free_port, reason
from lightning_proxy.core.errors import LightningError
from support.paths import ROOT


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


SLEEPS = python("import time; time.sleep(1000)")
# Says so when it is ready, then ignores both polite signals; its own child does too.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child: print(os.getpid(), child, flush=True)
time.sleep(1000)
"""


def exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(20):
        while any(exists(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def written(path: Path) -> list[int]:
    while not (path.exists() and path.read_text().endswith("\n")):
        await asyncio.sleep(0.02)
    return [int(word) for word in path.read_text().split()]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (python("print('no room'); raise SystemExit(7)"), r"web ended \(exit code 7\): no room"),
        (["sh", "-c", "kill -9 $$"], "web ended .signal SIGKILL"),
        (["/no/such"], "/no/such cannot be started: No such file"),
    ],
    ids=["exit code", "signal", "not there"],
)
async def test_a_child_that_dies_while_starting_is_reported_with_its_last_words(
    tmp_path: Path, command: list[str], told: str
) -> None:
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(ChildDied, match=told):
            child = await supervisor.start(ChildSpec("web", command, health_url="http://127.0.0.1:9"))
            await supervisor.wait_healthy(child)


async def test_a_child_that_may_end_does_not_disturb_the_work(tmp_path: Path) -> None:
    said: list[str] = []

    async def work() -> None:
        while not said:
            await asyncio.sleep(0.01)

    async with Supervisor(tmp_path, said.append) as supervisor:
        await supervisor.start(ChildSpec("one", ["true"], may_end=True, done="all is done"))
        await supervisor.guard(work())
        assert said == ["one ended: all is done"]


async def test_children_are_ended_newest_first(tmp_path: Path) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, said.append) as supervisor:
        for name in ("vllm", "proxy", "trainer"):
            await supervisor.start(ChildSpec(name, SLEEPS))
    assert said == ["stopping trainer", "stopping proxy", "stopping vllm"]


async def test_a_stubborn_child_is_killed_with_its_own_children(tmp_path: Path) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, said.append) as supervisor:
        await supervisor.start(ChildSpec("stubborn", python(STUBBORN), grace_s=0.2))
        pids = await written(tmp_path / "stubborn.log")
        assert all(exists(pid) for pid in pids)
    await until_gone(*pids)
    killed = "killing stubborn, which did not end in 0.2 s; committed data is kept"
    assert said == ["stopping stubborn", killed]


async def test_no_process_survives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from lightning_proxy.commands.system.processes import ChildSpec, Supervisor
async def main():
    async with Supervisor(Path({str(tmp_path)!r})) as supervisor:
        await supervisor.start(ChildSpec("stubborn", [{sys.executable!r}, "-c", {STUBBORN!r}]))
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    pids = await written(tmp_path / "stubborn.log")
    supervisor.kill()
    await supervisor.wait()
    await until_gone(*pids)


def test_sigterm_while_starting_stops_the_children_too(tmp_path: Path) -> None:
    children: list[int] = []

    async def start_and_wait_in_vain() -> None:
        async with Supervisor(tmp_path) as supervisor:
            child = await supervisor.start(ChildSpec("slow", SLEEPS, health_url="http://127.0.0.1:9/"))
            children.append(child.process.pid)
            asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGTERM)
            await supervisor.wait_healthy(child)

    with pytest.raises(Interrupted):
        run_until_signal(start_and_wait_in_vain())
    assert not exists(children[0])


def test_the_guard_starts_without_the_package(tmp_path: Path) -> None:
    guard = ROOT / "core" / "guard.py"
    read_end, write_end = os.pipe()
    command = [sys.executable, "-S", "-I", str(guard), str(read_end), "1", "sh", "-c", "exit 5"]
    assert subprocess.run(command, pass_fds=(read_end,), check=False).returncode == 5
    os.close(read_end)
    os.close(write_end)


async def test_a_child_that_dies_is_started_again_as_often_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RESTART_DELAY_S", 0.01)
    said: list[str] = []
    starts = str(tmp_path / "starts")
    script = f"import pathlib; pathlib.Path({starts!r}).open('a').write('x'); raise SystemExit(3)"
    async with Supervisor(tmp_path, said.append) as children:
        await children.start(ChildSpec("moody", python(script), restarts=2))
        with pytest.raises(ChildDied, match="exit code 3"):
            await children.guard(asyncio.Event().wait())
    assert Path(starts).read_text() == "xxx"
    assert sum("starting it again" in line for line in said) == 2


async def test_the_others_go_on_without_a_child_that_is_not_vital(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RESTARTS_S", 4.0)
    said: list[str] = []
    starts = tmp_path / "starts"
    script = f"import pathlib; pathlib.Path({str(starts)!r}).open('a').write('x'); raise SystemExit(3)"

    async def see_it_started(times: int) -> None:
        while not starts.exists() or len(starts.read_text()) < times:
            await asyncio.sleep(0.05)

    async with Supervisor(tmp_path, said.append) as children:
        await children.start(ChildSpec("moody", python(script), restarts=1, vital=False))
        await children.guard(see_it_started(4))
    assert any("the others keep running" in line for line in said)


async def test_a_child_that_was_told_something_wrong_is_not_started_again(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as children:
        spec = ChildSpec("wrong", python("raise SystemExit(2)"), restarts=2, vital=False)
        await children.start(spec)
        with pytest.raises(ChildDied, match="exit code 2"):
            await children.guard(asyncio.Event().wait())


async def test_a_child_that_closes_its_port_and_lives_on_is_started_again_as_if_it_had_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does vLLM with calls under way when the kernel kills its worker."""
    monkeypatch.setattr(processes, "PORT_POLL_S", 0.02)
    said, port = list[str](), free_port()
    script = f"import socket, time\nwith socket.create_server(('127.0.0.1', {port})): time.sleep(1)\ntime.sleep(1000)"
    async with Supervisor(tmp_path, said.append) as children:
        url = f"http://127.0.0.1:{port}/health"
        await children.start(ChildSpec("vllm", python(script), {}, url, grace_s=0.1, restarts=1))
        with pytest.raises(ChildDied, match="vllm closed its port and did not end"):
            await children.guard(asyncio.Event().wait())
    assert [line for line in said if "starting it again" in line] == [
        f"vllm closed its port and did not end: starting it again; see {tmp_path}/vllm.log"
    ]


async def test_a_child_that_is_not_ready_in_time_is_named_with_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STILL_S", 0.3)
    said = list[str]()
    prefixed = "(EngineCore pid=7) INFO 11-25 16:41:06 [core.py:133] loading"
    command = python(f"import time; print({prefixed!r}, flush=True); time.sleep(1000)")
    async with Supervisor(tmp_path, said.append) as children:
        child = await children.start(ChildSpec("vllm", command, {}, "http://127.0.0.1:9/", start_timeout_s=2.0))
        with pytest.raises(LightningError, match="vllm was not ready after 2.0s: .*loading"):
            await children.wait_healthy(child)
    assert any(line.startswith("still waiting for vllm after ") and line.endswith("s: loading") for line in said), said


# What vLLM 0.32 prints, without most of the tracebacks.
NO_ROOM = """(APIServer pid=1) WARNING 11-25 [system_utils.py:255] This can cause `OSError: [Errno 24] Too many files`.
(Worker pid=2) ERROR 11-25 [multiproc_executor.py:1063]     raise ValueError(
(Worker pid=2) ERROR 11-25 [multiproc_executor.py:1063] ValueError: Available memory on node 0 is less than requested.
(EngineCore pid=4) ERROR 11-25 [multiproc.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: 0).
RuntimeError: Worker failed with error 'Available', please check the stack trace above for the root cause
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
KILLED = """(EngineCore pid=4) ERROR 11-25 [multiproc.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9)
(EngineCore pid=4) ERROR 11-25 [core.py:1512] RuntimeError: Executor failed.
(APIServer pid=3) ERROR 11-25 [async_llm.py:906] EngineDeadError: See stack trace (above) for the root cause.
RuntimeError: Executor failed.
INFO:     Shutting down
"""


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (NO_ROOM, "ValueError: Available memory on node 0 is less than requested"),
        (KILLED, "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"),
        ("KeyError: 'a'\nlightning-proxy: every program failed\n", "every program failed"),
        ("sh: no such thing\n\n", "sh: no such thing"),
        ("", "it printed nothing"),
    ],
)  # fmt: skip
def test_the_reason_of_a_death_is_one_line_of_its_log(tmp_path: Path, printed: str, told: str) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: an earlier start's\n" + printed)
    assert reason(log, len("ValueError: an earlier start's\n")) == told
