"""Child processes: started, healthy, ended in order without orphans; why one died, and which one holds a port."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from ...core.errors import ConfigError, LightningError
from ...core.guard import start_guarded
from ...store.sqlite.file import make_private
from ..formats import duration, how_it_ended

T = TypeVar("T")
WAITING, STILL = "waiting for ", "still waiting for "  # a view knows these lines by them
KILL_AFTER_S = 0.5  # between SIGTERM and SIGKILL once nobody waits for a program
RESTARTS_S = 600.0
RESTART_DELAY_S = 1.0
SHORTAGE_S = 1800.0
SHORTAGE_DELAY_S = 10.0
PROGRESS_S = 1.0
STILL_S = 15.0
PORT_POLL_S = 1.0
LEFT_OVER_S = 10.0
LEFT_OVER_POLL_S = 0.1
NOBODY_S = 1.0  # a port that nobody holds can still be taken: its process is just ending

LONGEST = 400
NEWEST_BYTES = 4096
# An exception's last line, behind the prefix of vLLM's processes too; what our own commands end with; a killed worker.
_TELLING = re.compile(r"(?:^|\] )((?:[\w.]*(?:Error|Exception)\b|Worker \S+ \S+ died .*: -|lightning-proxy: ).*)", re.M)
_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:[A-Z]+ \S+ \S+ \[\S+\])?")  # vLLM's: process, level, time, place in its code
_TRAINER = re.compile(r"\S+ [\d:,]+ (INFO|WARNING|ERROR) \S+: (.*)")  # date, time, level, module, message
_ELSEWHERE = ("root cause", "Executor failed")  # vLLM's exceptions that only follow from an earlier one

PROC = Path("/proc")
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
WORKER = "--multiprocessing-fork"  # in the command of a worker that Python's multiprocessing has started


class ChildDied(LightningError):
    """A child ended that should keep running. The message has its exit code, and the reason from its log."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to keep running. `health_url` answers 200 once it is healthy; None: as soon as it runs.

    `may_end`: exit code 0 is no fault; `done` is said then. `restarts`: how often it is started again within
    `RESTARTS_S` when it dies, but never after exit code 2, which means a wrong configuration. When a `vital` program
    dies more often, the others end with it; another is started again after `RESTARTS_S`. Deaths whose output matches
    `shortage` do not count: it is tried again for `SHORTAGE_S`. Whenever `progress` returns something new,
    `start_timeout_s` begins anew. It has also died when its port, once open, is closed for `grace_s`: vLLM can wait for
    ever for calls that its lost worker had.
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
    shortage: str | None = None
    progress: Callable[[], object] | None = None


class Child:
    """A started program, its guard and its log."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: Path, lifeline: int) -> None:
        self.spec, self.process, self.log, self._lifeline = spec, process, log, lifeline
        self._restarted: list[float] = []
        self._short_since = 0.0
        self._launched()

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def stop(self, say: Callable[[str], None]) -> None:
        """Send SIGINT, SIGTERM after half of the grace, SIGKILL at its end, each to the entire process group."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if not self.running:
                break
            self._signal(number)
            with suppress(TimeoutError):
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

    def death(self) -> ChildDied:
        why = reason(self.log, self._output_from)
        return ChildDied(f"{self.spec.name} {self.how_it_ended()}: {why}; see {self.log}")

    async def ended(self) -> int | None:
        """Wait for the program's end and return its exit code. One that is deaf is killed."""
        ended = asyncio.ensure_future(self.process.wait())
        deaf = asyncio.ensure_future(_until_deaf(self.spec))
        try:
            await asyncio.wait((ended, deaf), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._is_deaf = True
                self.release()
            return await ended
        finally:
            ended.cancel()
            deaf.cancel()

    def how_it_ended(self) -> str:
        if self._is_deaf:
            return "closed its port and did not end"
        return f"ended ({how_it_ended(self.process.returncode)})"

    def may_restart(self) -> bool:
        """Return whether the child may be started again now. If so, count this as a restart."""
        now = time.monotonic()
        self._restarted = [at for at in self._restarted if now - at < RESTARTS_S]
        if self.process.returncode == 2 or len(self._restarted) >= self.spec.restarts:
            return False
        self._restarted.append(now)
        return True

    def is_short(self) -> bool:
        """Return whether it died for want of something that may be there later, and is to be tried again till then."""
        with self.log.open("rb") as log:
            log.seek(self._output_from)
            output = log.read().decode(errors="replace")
        if self.spec.shortage is None or re.search(self.spec.shortage, output) is None:
            self._short_since = 0.0
            return False
        now = time.monotonic()
        if not self._short_since or now - self._at > RESTARTS_S:  # it had found room since
            self._short_since = now
        return now - self._short_since < SHORTAGE_S

    def restarted(self, process: asyncio.subprocess.Process, lifeline: int, output_from: int) -> None:
        self.release()
        self.process, self._lifeline = process, lifeline
        self._launched(output_from)

    def _launched(self, output_from: int = 0) -> None:
        self._at, self._output_from, self._is_deaf = time.monotonic(), output_from, False

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            # The guard passes it on, since it knows whether the program still runs.
            self.process.send_signal(number)


class Supervisor:
    """Starts programs with `start` and ends them on exit, the newest first. Their logs are in `directory`."""

    def __init__(self, directory: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._directory, self._say = directory, say
        self._children: list[Child] = []

    async def __aenter__(self) -> Supervisor:
        make_directory(self._directory, "--logs")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, spec: ChildSpec) -> Child:
        """Start `spec` in a process group of its own. Its output goes to `<directory>/<name>.log`."""
        log = self._directory / f"{spec.name}.log"
        log.unlink(missing_ok=True)
        process, lifeline = await _launch(spec, log)
        child = Child(spec, process, log, lifeline)
        self._children.append(child)
        return child

    async def wait_healthy(self, child: Child) -> None:
        """Wait until the child's health URL answers 200. ChildDied if it ends before, LightningError if it is late."""
        self._say(f"{WAITING}{child.spec.name}")
        started = time.monotonic()
        ended = asyncio.ensure_future(child.process.wait())
        healthy = asyncio.ensure_future(_until_healthy(child.spec.health_url))
        telling = asyncio.ensure_future(self._tell_what_it_does(child))
        either: set[asyncio.Future[Any]] = {ended, healthy}
        try:
            await _until_one_is_done(either, child.spec)
            if ended.done():
                raise child.death()
            self._say(f"{child.spec.name} is ready after {duration(time.monotonic() - started)}")
        except TimeoutError:
            late = f"{child.spec.name} was not ready after {child.spec.start_timeout_s:.0f} s"
            raise LightningError(f"{late}: {reason(child.log)}; see {child.log}") from None
        finally:
            for future in (*either, telling):
                future.cancel()

    async def _tell_what_it_does(self, child: Child) -> None:
        """Say now and then how long a child has been starting, and the last line of its log, until cancelled."""
        for n in count(1):
            await asyncio.sleep(STILL_S)
            line = last_line(child.log)
            self._say(f"{STILL}{child.spec.name} after {duration(n * STILL_S)}{f': {line}' if line else ''}")

    async def watch(self) -> None:
        """Raise ChildDied when a child ends that should not. Never returns."""
        async with asyncio.TaskGroup() as watchers:
            for child in self._children:
                watchers.create_task(self._keep_up(child))
        await asyncio.Event().wait()

    async def _keep_up(self, child: Child) -> None:
        """Start the child again when it dies, as its spec allows, or raise ChildDied."""
        while await child.ended() != 0 or not child.spec.may_end:
            problem = f"{child.spec.name} {child.how_it_ended()}"
            if child.is_short():
                self._say(f"{problem} for want of memory: trying again for {SHORTAGE_S / 60:.0f} min; see {child.log}")
                await asyncio.sleep(SHORTAGE_DELAY_S)
            elif child.may_restart():
                self._say(f"{problem}: starting it again; see {child.log}")
                await asyncio.sleep(RESTART_DELAY_S)
            elif child.spec.vital or child.process.returncode == 2:
                raise child.death()
            else:
                self._say(
                    f"{problem} once more: the others keep running; starting it again in {RESTARTS_S / 60:.0f} min"
                )
                await asyncio.sleep(RESTARTS_S)
            size = child.log.stat().st_size
            child.restarted(*await _launch(child.spec, child.log), size)
        if child.spec.done:
            self._say(f"{child.spec.name} ended: {child.spec.done}")

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`. If a child dies for good, cancel the work and raise ChildDied."""
        doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.watch())
        either: set[asyncio.Future[Any]] = {doing, watching}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise _only(watching.exception())
            return doing.result()
        finally:
            for future in either:
                future.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    async def stop(self) -> None:
        """End all children, the newest first, even if it is cancelled meanwhile."""
        while self._children:
            child = self._children[-1]
            self._say(f"stopping {child.spec.name}")
            try:
                await child.stop(self._say)
            finally:
                child.release()
                self._children.remove(child)


async def _launch(spec: ChildSpec, log: Path) -> tuple[asyncio.subprocess.Process, int]:
    """Start the program under its guard, appending to `log`. Returns the process and our end of its lifeline."""
    make_private(log)
    with log.open("ab") as output:
        return await start_guarded(
            *spec.argv,
            grace_s=KILL_AFTER_S,
            env={**os.environ, **spec.env, "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )


async def _until_one_is_done(either: set[asyncio.Future[Any]], spec: ChildSpec) -> None:
    """Wait for one of them; TimeoutError once `start_timeout_s` have passed since the newest progress."""
    seen: object = None
    while True:
        until = time.monotonic() + spec.start_timeout_s
        while (left := until - time.monotonic()) > 0:
            wait = min(left, PROGRESS_S) if spec.progress is not None else left
            done, _ = await asyncio.wait(either, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            now = None if spec.progress is None else await asyncio.to_thread(spec.progress)
            if now != seen:
                seen = now
                break
        else:
            raise TimeoutError


def _only(error: BaseException | None) -> BaseException:
    """The first error in a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None
    return error


def make_directory(path: Path, option: str) -> Path:
    """Make the directory if it is not there and return its absolute path. A ConfigError names the option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: cannot make the directory {path}: {error.strerror}") from None
    return path.absolute()


def require_free_port(host: str, port: int, key: str) -> None:
    """Raise LightningError if something listens there, naming the configuration's key and the process.

    Workers whose supervisor was killed are ending: they are waited for.
    """
    began = time.monotonic()
    while (error := _why_not_bound(host, port)) is not None:
        # The host is unknown or is not this machine, so no other port would help.
        wrong = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        holder = holder_of(port) if error.errno == errno.EADDRINUSE else None
        is_ending = error.errno == errno.EADDRINUSE and (holder is None or holder.is_left)
        if is_ending and time.monotonic() - began < (LEFT_OVER_S if holder else NOBODY_S):
            time.sleep(LEFT_OVER_POLL_S)
            continue
        held = f": process {holder.pid} ({holder.command[:100]}) listens there" if holder else ""
        key = key.replace("port", "host") if wrong else key
        instead = f"stop it, or choose another {key}" if holder else f"choose another {key}"
        raise LightningError(f"{host}:{port} cannot be bound ({error.strerror}){held}: {instead}")


def _why_not_bound(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_healthy(url: str | None) -> None:
    if url is None:
        return
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.25)


async def _until_deaf(spec: ChildSpec) -> None:
    """Return once the program's port was open and has then been closed for its grace; without a port, never."""
    while spec.health_url is None:
        await asyncio.Event().wait()
    address, was_open, since = urlsplit(spec.health_url), False, 0.0
    while True:
        with suppress(OSError):
            try:
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.close()
                was_open, since = True, 0.0
            except ConnectionRefusedError:
                since = since or time.monotonic()
                if was_open and time.monotonic() - since > spec.grace_s:
                    return
        await asyncio.sleep(PORT_POLL_S)


def reason(log: Path, begin: int = 0) -> str:
    """Return the last line that tells why, from byte `begin` on; without one, the last line that is not empty."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    told = [line for line in _TELLING.findall(text) if not any(word in line for word in _ELSEWHERE)]
    lines = told or [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    return lines[-1].strip().removeprefix("lightning-proxy: ").rstrip(".")[:LONGEST]


def last_line(log: Path) -> str:
    """Return the newest line that is not empty, without the prefix of vLLM's processes; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - NEWEST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:  # it is being started
        return ""
    lines = (_PREFIX.sub("", line).strip() for line in reversed(text.splitlines()))
    return next(filter(None, lines), "")[:LONGEST]


def newest_of_trainer(log: Path) -> tuple[str, bool]:
    """Return the newest message in a trainer's log without its time, and whether it is a warning or an error."""
    line = last_line(log)
    found = _TRAINER.fullmatch(line)
    return (found[2], found[1] != "INFO") if found else (line, False)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port. `is_left`: a worker that is about to end, since its supervisor is gone."""

    pid: int
    command: str
    is_left: bool


def holder_of(port: int) -> Holder | None:
    """Return the process that listens on this port, a supervisor before its workers; None if nobody can tell."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    found = {pid: _command(pid) for pid in _processes() if sockets and _has_one_of(pid, sockets)}
    if not found:
        return None
    pid = min(found, key=lambda pid: (WORKER in found[pid], pid))
    return Holder(pid, found[pid], WORKER in found[pid])


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port, at whatever address."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _processes() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in PROC.iterdir() if path.name.isdigit())


def _has_one_of(pid: int, sockets: set[str]) -> bool:
    """Whether a process has one of these sockets open. Those of other users keep that to themselves."""
    with suppress(OSError):
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if str(descriptor.readlink()) in sockets:
                    return True
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
