"""A real Ray cluster of this machine: a head and further nodes, each a process of its own, on 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_proxy.commands.command_line import telemetry_off

RAY = Path(sys.executable).with_name("ray")
HEAD = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of another machine's self
STORE_BYTES = 80_000_000  # the least that Ray takes is 75 MB


class RayCluster:
    """The head has no room for tasks; they run on the nodes that `add_node` starts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nodes: list[subprocess.Popen[bytes]] = []
        with socket.create_server((HEAD, 0)) as free:
            port = free.getsockname()[1]
        self.address = f"{HEAD}:{port}"
        self._start("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false")

    def add_node(self, ip: str = HEAD) -> subprocess.Popen[bytes]:
        """Start a node with room for one program. With an address of its own it is another machine to Ray."""
        return self._start(f"--address={self.address}", "--num-cpus=1", ip=ip)

    def remove_node(self, node: subprocess.Popen[bytes]) -> None:
        """As a machine goes away: all at once, without a word."""
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def close(self) -> None:
        for node in reversed(self._nodes):
            self.remove_node(node)

    def _start(self, *options: str, ip: str = HEAD) -> subprocess.Popen[bytes]:
        command = [str(RAY), "start", "--block", f"--node-ip-address={ip}", *options]
        command += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"] if "--head" in options else []
        command += [f"--temp-dir={self._directory}"] if "--head" in options else []
        log = self._directory / f"node-{len(self._nodes)}.log"
        with log.open("wb") as output:
            env = os.environ | telemetry_off()
            node = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=env)
        self._nodes.append(node)
        deadline = time.monotonic() + 60
        while b"Ray runtime started" not in log.read_bytes():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return node


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets' paths have to be short
    cluster = RayCluster(directory)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
