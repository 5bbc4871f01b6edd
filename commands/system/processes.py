"""Starts, watches and stops child processes, and leaves no orphans."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import psutil

from ...core.errors import ConfigError, LightningError
from ...core.guard import start_guarded
from ...store.sqlite.file import make_private
from ..formats import duration, how_it_ended

T = TypeVar("T")
KILL_AFTER_S = 0.5  # between SIGTERM and SIGKILL once nobody waits for a program
RESTARTS_S = 600.0
RESTART_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0  # doubled with each restart: a GPU's memory may be short for minutes
HEALTH_POLL_S = 0.25
STILL_S = 15.0
PORT_POLL_S = 1.0
ENDING_S, ENDING_POLL_S = 1.0, 0.1

LONGEST = 400
NEWEST_BYTES = 4096
# An exception's last line, behind the prefix of vLLM's processes too; what our own commands end with; a killed worker.
_TELLING = re.compile(r"(?:^|\] )((?:[\w.]*(?:Error|Exception)\b|Worker \S+ \S+ died .*: -|lightning-proxy: ).*)", re.M)
_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:[A-Z]+ \S+ \S+ \[\S+\])?")  # vLLM's: process, level, time, place in its code
_ELSEWHERE = ("root cause", "Executor failed")  # vLLM's exceptions that only follow from an earlier one
WORKER = "--multiprocessing-fork"  # in the command of a worker that Python's multiprocessing has started


class ChildDied(LightningError):
    """A child process ended or closed its port. The message gives the reason from its log."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to keep running. It is healthy when `health_url` answers with 200, or at once if that is None.

    `may_end`: exit code 0 is not a failure, and `done` is printed. `restarts`: how often the program may be restarted
    within `RESTARTS_S`. If it dies more often and is `vital`, all programs are stopped; otherwise it is restarted after
    `RESTARTS_S`. Exit code 2 (a wrong configuration) always stops all. A program also counts as dead if its port, once
    open, stays closed for `grace_s`: vLLM can wait for a lost worker for ever.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    health_url: str | None = None
    start_timeout_s: float = 600.0
    grace_s: float = 15.0
    may_end: bool = False
    done: str | None = None
    restarts: int = 0
    vital: bool = True


class Child:
    """A program that is started and restarted, with its guard and its log."""

    def __init__(self, spec: ChildSpec, log: Path) -> None:
        self.spec, self.log = spec, log
        self.process: asyncio.subprocess.Process
        self._lifeline = -1

    async def launch(self) -> None:
        """Start the program under a guard, and append its output to the log."""
        self.release()
        make_private(self.log)
        with self.log.open("ab") as output:
            self._output_from = output.tell()
            self.process, self._lifeline = await start_guarded(
                *self.spec.argv,
                grace_s=KILL_AFTER_S,
                env={**os.environ, **self.spec.env, "PYTHONUNBUFFERED": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )
        self.launched_at, self._is_deaf = time.monotonic(), False

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def interrupt(self) -> None:
        if self.running:
            self.process.send_signal(signal.SIGINT)
            await self.process.wait()

    async def stop(self, say: Callable[[str], None]) -> None:
        """End the program with SIGINT or else SIGTERM, or kill it after `grace_s`. Then kill what it left running."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(TimeoutError, ProcessLookupError):
                if self.running:
                    # The guard passes it on, since it knows whether the program still runs.
                    self.process.send_signal(number)
                    await asyncio.wait_for(self.process.wait(), self.spec.grace_s / 2)
        if self.running:
            say(f"killing {self.spec.name}, which did not end in {self.spec.grace_s:g} s; committed data is kept")
        # The guard sees the closed pipe and kills the rest of the group, itself last.
        self.release()
        await self.process.wait()

    def release(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def ended(self) -> int:
        """Wait for the program to end and return its exit code. Kill it if its port stays closed for `grace_s`."""
        ended, was_open, open_at = asyncio.ensure_future(self.process.wait()), False, 0.0
        try:
            while not (await asyncio.wait([ended], timeout=PORT_POLL_S))[0]:
                if await _is_open(self.spec.health_url):
                    was_open, open_at = True, time.monotonic()
                elif was_open and time.monotonic() - open_at > self.spec.grace_s:
                    self._is_deaf = True
                    self.release()
            return ended.result()
        finally:
            ended.cancel()

    def how_it_ended(self) -> str:
        if self._is_deaf:
            return f"{self.spec.name} closed its port and did not end"
        return f"{self.spec.name} ended ({how_it_ended(self.process.returncode)})"

    def death(self) -> ChildDied:
        return ChildDied(f"{self.how_it_ended()}: {reason(self.log, self._output_from)}; see {self.log}")


class Supervisor:
    """Starts programs with `start` and stops them on exit, newest first. Their logs are in `directory`."""

    def __init__(self, directory: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._directory, self._say = directory, say
        self._children: list[Child] = []

    async def __aenter__(self) -> Supervisor:
        make_directory(self._directory, "--logs")
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._children:
            child = self._children[-1]
            self._say(f"stopping {child.spec.name}")
            try:
                await child.stop(self._say)
            finally:
                child.release()
                self._children.remove(child)

    async def start(self, spec: ChildSpec) -> Child:
        """Start `spec`. Its output goes to `<directory>/<name>.log`, which begins empty."""
        child = Child(spec, self._directory / f"{spec.name}.log")
        child.log.unlink(missing_ok=True)
        await child.launch()
        self._children.append(child)
        return child

    async def wait_healthy(self, child: Child) -> None:
        """Wait until the child is healthy. Raise ChildDied if it ends first, LightningError if it takes too long."""
        spec, began = child.spec, time.monotonic()
        self._say(f"waiting for {spec.name}")
        tell_at = began + STILL_S
        while not await _is_healthy(spec.health_url):
            await asyncio.sleep(HEALTH_POLL_S)
            now = time.monotonic()
            if not child.running:
                raise child.death()
            if now >= tell_at:
                tell_at += STILL_S
                line = last_line(child.log)
                self._say(f"still waiting for {spec.name} after {duration(now - began)}{f': {line}' if line else ''}")
            if now - began >= spec.start_timeout_s:
                late = f"{spec.name} was not ready after {duration(spec.start_timeout_s)}"
                raise LightningError(f"{late}: {reason(child.log)}; see {child.log}")
        self._say(f"{spec.name} is ready after {duration(time.monotonic() - began)}")

    async def keep_up(self, child: Child) -> None:
        """Restart the child whenever it dies. Return if it ends with success; raise ChildDied if it dies for good."""
        spec, restarts = child.spec, list[float]()
        while (code := await child.ended()) != 0 or not spec.may_end:
            now = time.monotonic()
            restarts = [at for at in restarts if now - at < RESTARTS_S]
            if code != 2 and len(restarts) < spec.restarts:
                what, delay_s = ": starting it again", min(RESTART_DELAY_S * 2 ** len(restarts), LONGEST_DELAY_S)
                restarts.append(now)
            elif spec.vital or code == 2:
                raise child.death()
            else:
                again = f"starting it again in {RESTARTS_S / 60:.0f} min"
                what, delay_s = f" once more: the others keep running; {again}", RESTARTS_S
            self._say(f"{child.how_it_ended()}{what}; see {child.log}")
            await asyncio.sleep(delay_s)
            await child.launch()
        if spec.done:
            self._say(f"{spec.name} ended: {spec.done}")

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`. If a child dies for good, cancel the work and raise ChildDied."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(self.keep_up(child)) for child in self._children]
                try:
                    return await work
                finally:
                    for watcher in watching:
                        watcher.cancel()
        except* LightningError as errors:
            raise errors.exceptions[0] from None


def make_directory(path: Path, option: str) -> Path:
    """Create the directory if needed and return its absolute path. Raises ConfigError if that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: cannot create the directory {path}: {error.strerror}") from None
    return path.absolute()


async def _is_healthy(url: str | None) -> bool:
    if url is None:
        return True
    with suppress(aiohttp.ClientError, TimeoutError):
        async with aiohttp.request("GET", url, timeout=aiohttp.ClientTimeout(total=10)) as answer:
            return answer.status == 200
    return False


async def _is_open(url: str | None) -> bool:
    """Return whether the URL's port is open: it is unless it refuses connections."""
    try:
        if url is not None:
            address = urlsplit(url)
            async with asyncio.timeout(PORT_POLL_S):  # one that hangs accepts none
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def _read_from(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def reason(log: Path, begin: int = 0) -> str:
    """Return the last line of a log that states a reason, or else its last line that is not empty."""
    text = _read_from(log, begin)
    told = [line for line in _TELLING.findall(text) if not any(word in line for word in _ELSEWHERE)]
    lines = told or [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    return lines[-1].strip().removeprefix("lightning-proxy: ").rstrip(".")[:LONGEST]


def last_line(log: Path) -> str:
    """Return a log's last line that is neither empty nor a warning; "" if there is none."""
    try:
        text = _read_from(log, max(0, log.stat().st_size - NEWEST_BYTES))
    except OSError:  # it is being started
        return ""
    lines = (_PREFIX.sub("", line).strip() for line in reversed(text.splitlines()))
    # What `vllm` warns of before vLLM itself begins says nothing of what it is doing.
    return next((line for line in lines if line and not line.startswith("warning: ")), "")[:LONGEST]


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int, key: str) -> None:
    """Raise LightningError if the address cannot be bound. Its message says what to change.

    If another process has the port, this waits a little first, because that process may be about to end.
    """
    until = time.monotonic() + ENDING_S
    while (error := _why_not_bound(host, port)) and error.errno == errno.EADDRINUSE and time.monotonic() < until:
        time.sleep(ENDING_POLL_S)
    if error is None:
        return
    holder = holder_of(port) if error.errno == errno.EADDRINUSE else None
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        key = key.replace("port", "host")  # unknown, or not this machine: no other port would help
    held = f": process {holder[0]} ({holder[1][:100]}) listens there" if holder else ""
    instead = f"{'stop it, or ' * bool(holder)}choose another {key}"
    raise LightningError(f"{host}:{port} cannot be bound ({error.strerror}){held}; {instead}")


def _why_not_bound(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def holder_of(port: int) -> tuple[int, str] | None:
    """Return the id and command line of the port's listener, or of its parent if it is a worker; None if unknown."""
    with suppress(psutil.Error, StopIteration):  # it has just ended, or is another user's
        listening = (one for one in psutil.net_connections("tcp") if one.pid and one.status == psutil.CONN_LISTEN)
        process = psutil.Process(next(one.pid for one in listening if one.laddr.port == port))
        if WORKER in process.cmdline():
            process = process.parent() or process
        return process.pid, " ".join(process.cmdline())
    return None
