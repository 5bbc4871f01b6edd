"""A port that is taken: who has it is named, and workers of a killed supervisor are waited for."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from lightning_proxy.commands import serve
from lightning_proxy.commands.system import processes
from lightning_proxy.commands.system.processes import LEFT_OVER_S, WORKER, free_port, holder_of, require_free_port
from lightning_proxy.commands.system.system import check_addresses
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, LightningError

LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    print("listens", flush=True)
    sys.stdin.read()
"""


@contextmanager
def listening(port: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens there until its standard input is closed."""
    command = [sys.executable, "-c", LISTEN, str(port), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        yield process
        process.kill()


def test_a_port_that_is_taken_is_refused_with_the_process_that_has_it() -> None:
    port = free_port()
    with listening(port, "another program") as process, pytest.raises(LightningError) as refused:
        require_free_port("127.0.0.1", port, "proxy.port")
    said = str(refused.value)
    assert f"process {process.pid} ({sys.executable} -c" in said
    assert said.startswith(f"127.0.0.1:{port} cannot be bound (Address already in use)")
    assert said.endswith("listens there: stop it, or choose another proxy.port")


def test_workers_of_a_killed_supervisor_are_waited_for() -> None:
    port = free_port()
    with listening(port, "--multiprocessing-fork") as worker:
        holder = holder_of(port)
        assert holder is not None and (holder[0], WORKER in holder[1]) == (worker.pid, True)
        assert worker.stdin is not None
        worker.stdin.close()  # it needs a moment to end
        require_free_port("127.0.0.1", port, "proxy.port")


def test_a_process_that_ended_while_it_was_looked_for_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with listening(port, "--multiprocessing-fork") as worker:

        def ended_meanwhile(_: int) -> None:
            worker.kill()

        monkeypatch.setattr(processes, "holder_of", ended_meanwhile)
        require_free_port("127.0.0.1", port, "proxy.port")


def test_workers_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LEFT_OVER_S", 0.3)
    port = free_port()
    with listening(port, "--multiprocessing-fork") as worker, pytest.raises(LightningError, match=str(worker.pid)):
        require_free_port("127.0.0.1", port, "proxy.port")


def test_a_supervisor_that_lives_is_not_waited_for() -> None:
    """It shares its socket with its workers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, shared = server.getsockname()[1], server.fileno()
        command = [sys.executable, "-c", "import sys; sys.stdin.read()", "--multiprocessing-fork"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[shared]) as worker:
            holder = holder_of(port)
            worker.kill()
    assert holder is not None and (holder[0], WORKER in holder[1]) == (os.getpid(), False)


def test_a_vllm_that_was_moved_by_one_of_its_two_keys_is_told_with_both() -> None:
    moved = "vllm.port is 9, but the upstream policy is at port 8100: set both, as in vllm: {port: 9} and upstreams: "
    with pytest.raises(ConfigError, match=re.escape(moved)):
        check_addresses(Config.model_validate({"vllm": {"port": 9}}))


def test_a_worker_that_hangs_ends_soon_after_its_supervisor() -> None:
    script = (
        "import multiprocessing, time\n"
        "from support.hanging_worker import hang\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=hang)\n"
        "    worker.start()\n"
        "    print(worker.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    tests = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=tests) as supervisor:
        assert supervisor.stdout is not None
        worker = int(supervisor.stdout.readline())
        supervisor.kill()
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(worker)
        assert wait([ended], 60)
        os.close(ended)
    assert serve.ORPHAN_S < LEFT_OVER_S
