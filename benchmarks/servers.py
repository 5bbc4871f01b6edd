"""The programs that a benchmark starts, and what they cost: processor time, memory, open files (Linux)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Unavailable(Exception):
    """A target cannot be measured here; the message says why."""


class Server:
    """A program that listens on `port` of the loopback, with its children; ended by `stop`."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        port: int,
        *,
        ready: str = "/v1/models",
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """Start it and wait, for at most `patience_s`, until `ready` is answered with 200; else Unavailable."""
        self.port = port
        output: Any = log.open("wb") if log else None
        self._popen = subprocess.Popen(
            [str(part) for part in argv], env=os.environ | (env or {}), stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if self._popen.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.url + ready, timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        said = log.read_text(errors="replace").strip() if log else ""
        raise Unavailable(f"{Path(argv[0]).name} did not start: {said[-1000:]}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pids(self) -> Iterator[int]:
        """The process and all that it has started."""
        waiting = [self._popen.pid]
        while waiting:
            pid = waiting.pop()
            yield pid
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                waiting += [int(child) for child in children.read_text().split()]

    def cpu_s(self) -> float:
        """User and system time of all threads so far."""
        fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.pids())
        return sum(int(values[11]) + int(values[12]) for values in fields) / TICKS

    def settle(self, limit_s: float = 10.0) -> None:
        """Wait until it has done what it does after its answers; for `limit_s` at most."""
        until, before = time.monotonic() + limit_s, self.cpu_s()
        while time.monotonic() < until:
            time.sleep(0.1)
            now = self.cpu_s()
            if now - before <= 0.02:
                return
            before = now

    def rss_mib(self) -> float:
        statuses = (Path(f"/proc/{pid}/status").read_text() for pid in self.pids())
        return sum(int(status.split("VmRSS:")[1].split()[0]) for status in statuses) / 1024

    def peak_mib(self) -> float:
        statuses = (Path(f"/proc/{pid}/status").read_text() for pid in self.pids())
        return sum(int(status.split("VmHWM:")[1].split()[0]) for status in statuses) / 1024

    def open_files(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.pids())

    def get(self, path: str, timeout_s: float = 10.0) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return json.load(answer)

    def send(self, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
        """The answer's JSON, or its text; HTTPError unless it is a 2xx."""
        request = urllib.request.Request(
            self.url + path, None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"}, method=method,
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def stop(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
        try:
            self._popen.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
