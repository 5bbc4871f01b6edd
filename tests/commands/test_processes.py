"""What `up` starts: health, order, deaths, no orphans, ports that are taken, and what a person sees of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lightning_proxy.commands.signals import Interrupted, run_until_signal
from lightning_proxy.commands.system import processes, steps
from lightning_proxy.commands.system.processes import (
    ChildDied,
    ChildSpec,
    Supervisor,
    free_port,
    holder_of,
    reason,
    require_free_port,
)
from lightning_proxy.commands.system.up import UpView
from lightning_proxy.core.errors import LightningError


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


async def test_a_child_that_is_not_ready_in_time_is_named_with_what_it_does(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo loading; exec sleep 1000"]
    async with Supervisor(tmp_path) as supervisor:
        child = await supervisor.start(ChildSpec("vllm", command, {}, "http://127.0.0.1:9/", start_timeout_s=3.0))
        with pytest.raises(LightningError, match="vllm was not ready after 3.0s: .*loading"):
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


async def test_children_are_ended_newest_first_and_a_stubborn_one_is_killed_with_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    async with Supervisor(tmp_path, said.append) as supervisor:
        for name in ("vllm", "proxy"):
            await supervisor.start(ChildSpec(name, SLEEPS))
        await supervisor.start(ChildSpec("stubborn", python(STUBBORN), grace_s=0.2))
        pids = await written(tmp_path / "stubborn.log")
        assert all(exists(pid) for pid in pids)
    await until_gone(*pids)
    killed = "killing stubborn, which did not end in 0.2 s; committed data is kept"
    assert said == ["stopping stubborn", killed, "stopping proxy", "stopping vllm"]


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


@pytest.mark.parametrize(
    ("code", "restarts", "starts"), [(3, 2, 3), (2, 2, 1)], ids=["as often as it may", "told something wrong"]
)
async def test_a_child_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, restarts: int, starts: int
) -> None:
    monkeypatch.setattr(processes, "RESTART_DELAY_S", 0.01)
    script = f"print('x', flush=True); raise SystemExit({code})"
    async with Supervisor(tmp_path) as children:
        await children.start(ChildSpec("moody", python(script), restarts=restarts, vital=code != 2))
        with pytest.raises(ChildDied, match=f"exit code {code}"):
            await children.guard(asyncio.Event().wait())
    assert (tmp_path / "moody.log").read_text().count("x\n") == starts


async def test_the_others_go_on_without_a_child_that_is_not_vital(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RESTARTS_S", 4.0)
    said, log = list[str](), tmp_path / "moody.log"

    async def see_it_started(times: int) -> None:
        while not log.exists() or log.read_text().count("x\n") < times:
            await asyncio.sleep(0.05)

    async with Supervisor(tmp_path, said.append) as children:
        script = "print('x', flush=True); raise SystemExit(3)"
        await children.start(ChildSpec("moody", python(script), restarts=1, vital=False))
        await children.guard(see_it_started(4))
    assert any("the others keep running" in line for line in said)


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


# What vLLM 0.32 prints, without most of the tracebacks.
NO_ROOM = """(APIServer pid=1) WARNING 11-25 [system_utils.py:255] This can cause `OSError: [Errno 24] Too many files`.
(Worker pid=2) ERROR 11-25 [multiproc_executor.py:1063] ValueError: Available memory on node 0 is less than requested.
(EngineCore pid=4) ERROR 11-25 [multiproc.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: 0).
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


LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    print("listens", flush=True)
    sys.stdin.read()
"""


def test_a_process_that_has_the_port_is_named_and_waited_for_while_it_ends() -> None:
    port = free_port()
    command = [*python(LISTENS), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"listens\n"
        with pytest.raises(LightningError, match=rf"(?s)cannot be bound .*process {process.pid} \(.* listens there"):
            require_free_port("127.0.0.1", port, "proxy.port")
        threading.Timer(0.3, process.kill).start()
        require_free_port("127.0.0.1", port, "proxy.port")


def test_of_workers_their_supervisor_is_named() -> None:
    """It shares its socket with them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, shared = server.getsockname()[1], server.fileno()
        command = [sys.executable, "-c", "import sys; sys.stdin.read()", "--multiprocessing-fork"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[shared]) as worker:
            holder = holder_of(port)
            worker.kill()
    assert holder is not None and holder[0] == os.getpid()


WAITS = "2026-11-26 03:20:2{} ERROR lightning_proxy.trainer.loop: step 3 waits to be saved: no space; free some space\n"
STEP = "2026-11-26 03:20:30,016 INFO lightning_proxy.commands.system.steps: step 3 reward 0.5\n"


async def test_a_warning_that_only_repeats_is_told_once_and_one_that_is_half_written_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "POLL_S", 0.01)
    log, told = tmp_path / "trainer.log", list[str]()
    log.write_text(STEP + WAITS.format("4,016") + WAITS.format("6,020"))
    telling = asyncio.ensure_future(steps.say_warnings(log, told.append))
    for text in ("2026-11-26 03:20:31,016 WARNING lightning_proxy.trainer.loop: vLLM ", "is away\n"):
        with log.open("a") as file:
            file.write(text)
        await asyncio.sleep(0.1)
    while len(told) < 2:
        await asyncio.sleep(0.01)
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert told == ["trainer: step 3 waits to be saved: no space; free some space", "trainer: vLLM is away"]


async def test_what_is_added_to_the_proxys_log_is_shown_also_after_it_began_anew(tmp_path: Path) -> None:
    out, log = StringIO(), tmp_path / "proxy.log"
    log.write_text("before\n")
    following = asyncio.create_task(UpView(Console(file=out, width=80)).follow(log))
    await asyncio.sleep(0)
    for text, mode, last in (("one\ntw", "a", "one"), ("o\n", "a", "two"), ("new\n", "w", "new")):
        with log.open(mode) as file:
            file.write(text)
        while last not in out.getvalue():
            assert not following.done()
            await asyncio.sleep(0.05)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert out.getvalue().splitlines() == ["one", "two", "new"]
