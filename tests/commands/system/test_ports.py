"""A port that is taken: who has it is named, and one that is ending is waited for."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_proxy.commands.system.processes import free_port, holder_of, require_free_port
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


def test_a_process_that_is_ending_is_waited_for() -> None:
    port = free_port()
    with listening(port) as process:
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


def test_a_vllm_that_was_moved_by_one_of_its_two_keys_is_told_with_both() -> None:
    moved = "vllm.port is 9, but the upstream policy is at port 8100: set both, as in vllm: {port: 9} and upstreams: "
    with pytest.raises(ConfigError, match=re.escape(moved)):
        check_addresses(Config.model_validate({"vllm": {"port": 9}}))
