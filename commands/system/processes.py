"""A small supervisor: starts children, waits until they are well, ends them in order, leaves no orphans (Linux)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from ...proxy.errors import ConfigError, LightningError

T = TypeVar("T")
GUARD = Path(__file__).with_name("guard.py")
RESTARTS_S = 600.0
RESTART_DELAY_S = 1.0


class ChildDied(LightningError):
    """A child ended that should have gone on; the message holds its exit code and its last words."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to keep running. `health_url` answers 200 once it is well; None: well as soon as it runs.

    `may_end`: to end with exit code 0 is no fault. `restarts`: how often it is started again within `RESTARTS_S` when
    it dies; never after exit code 2, which says that what it was told is wrong. `vital`: the others end with it when it
    died more often; else they go on, and it is started again after `RESTARTS_S`.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    health_url: str | None = None
    start_timeout_s: float = 600.0
    grace_s: float = 15.0
    may_end: bool = False
    restarts: int = 0
    vital: bool = True


class Child:
    """A started program, its guard and its log."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: Path, lifeline: int) -> None:
        self.spec, self.process, self.log, self._lifeline = spec, process, log, lifeline
        self._restarted: list[float] = []

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def stop(self, say: Callable[[str], None]) -> None:
        """SIGINT, SIGTERM when half of the grace is over, SIGKILL at its end; its whole process group each time."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if not self.running:
                break
            self._signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), self.spec.grace_s / 2)
        if self.running:
            say(f"killing {self.spec.name}, which did not end in {self.spec.grace_s:g} s; what it committed is kept")
        # The guard sees the closed pipe and kills what is left of the group, itself last.
        self.release()
        await self.process.wait()

    def release(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def death(self) -> ChildDied:
        return ChildDied(f"{self.spec.name} {self.how_it_ended()}; the end of {self.log}:\n{tail(self.log)}")

    def how_it_ended(self) -> str:
        code = self.process.returncode
        return f"ended (signal {signal.Signals(-code).name})" if code and code < 0 else f"ended (exit code {code})"

    def may_restart(self) -> bool:
        """Whether it may be started again now; counts as a restart if so."""
        now = time.monotonic()
        self._restarted = [at for at in self._restarted if now - at < RESTARTS_S]
        if self.process.returncode == 2 or len(self._restarted) >= self.spec.restarts:
            return False
        self._restarted.append(now)
        return True

    def restarted(self, process: asyncio.subprocess.Process, lifeline: int) -> None:
        self.release()
        self.process, self._lifeline = process, lifeline

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            # To the guard, which passes it on: it knows whether the program is still there.
            self.process.send_signal(number)


class Supervisor:
    """`async with Supervisor(directory) as children:` starts programs with `start`; ends the newest first on exit."""

    def __init__(self, directory: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._directory, self._say = directory, say
        self._children: list[Child] = []

    async def __aenter__(self) -> Supervisor:
        make_directory(self._directory, "--logs")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, spec: ChildSpec) -> Child:
        """Start `spec`, in a process group of its own; its output goes to `<directory>/<name>.log`."""
        log = self._directory / f"{spec.name}.log"
        log.unlink(missing_ok=True)
        process, lifeline = await _launch(spec, log)
        child = Child(spec, process, log, lifeline)
        self._children.append(child)
        return child

    async def wait_healthy(self, child: Child) -> None:
        """Return when the child's health URL answers 200; ChildDied if it ends before, LightningError if it is late."""
        self._say(f"waiting for {child.spec.name}")
        try:
            async with asyncio.timeout(child.spec.start_timeout_s):
                await self._either(child, _answers(child.spec.health_url))
        except TimeoutError:
            late = f"{child.spec.name} was not ready after {child.spec.start_timeout_s:.0f} s"
            raise LightningError(f"{late}; the end of {child.log}:\n{tail(child.log)}") from None

    async def watch(self) -> None:
        """Wait until a child ends that should not, then raise ChildDied; never returns."""
        async with asyncio.TaskGroup() as watchers:
            for child in self._children:
                watchers.create_task(self._keep_up(child))
        await asyncio.Event().wait()

    async def _keep_up(self, child: Child) -> None:
        """Start the child again when it dies, as its spec allows; else raise ChildDied."""
        while await child.process.wait() != 0 or not child.spec.may_end:
            said = f"{child.spec.name} {child.how_it_ended()}"
            if child.may_restart():
                self._say(f"{said}: starting it again; see {child.log}")
                await asyncio.sleep(RESTART_DELAY_S)
            elif child.spec.vital or child.process.returncode == 2:
                raise child.death()
            else:
                self._say(f"{said} once more: the others go on, and it is started again in {RESTARTS_S / 60:.0f} min")
                await asyncio.sleep(RESTARTS_S)
            child.restarted(*await _launch(child.spec, child.log))

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` as long as all children are well; ChildDied, and the work cancelled, if one is not."""
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
        """End all children, the newest first; goes on to the end even if it is cancelled meanwhile."""
        while self._children:
            child = self._children[-1]
            self._say(f"stopping {child.spec.name}")
            try:
                await child.stop(self._say)
            finally:
                child.release()
                self._children.remove(child)

    async def _either(self, child: Child, healthy: asyncio.Future[None]) -> None:
        ended = asyncio.ensure_future(child.process.wait())
        either: set[asyncio.Future[Any]] = {ended, healthy}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise child.death()
        finally:
            ended.cancel()
            healthy.cancel()


async def _launch(spec: ChildSpec, log: Path) -> tuple[asyncio.subprocess.Process, int]:
    """Start the program under its guard, its output appended to `log`; the process, and our end of its lifeline."""
    read_end, lifeline = os.pipe()
    try:
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", "-E", str(GUARD), str(read_end), *spec.argv),
                env={**os.environ, **spec.env, "PYTHONUNBUFFERED": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(read_end,),
                start_new_session=True,
            )
    finally:
        os.close(read_end)
    return process, lifeline


def _only(error: BaseException | None) -> BaseException:
    """The first error of a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None
    return error


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join("    " + line[:300] for line in text[-lines:] if line.strip())


def make_directory(path: Path, option: str) -> Path:
    """The directory, made if need be, as an absolute path; ConfigError naming the option if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: cannot make the directory {path}: {error.strerror}") from None
    return path.absolute()


def address(host: str, port: int) -> str:
    """Where a server that listens on this host is reached from here, for a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def require_free_port(host: str, port: int, key: str) -> None:
    """LightningError naming the configuration's key if something listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            # The host is no name, or not this machine's: no port of it would do.
            wrong = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            key = key.replace("port", "host") if wrong else key
            raise LightningError(f"{host}:{port} cannot be bound ({error.strerror}): choose another {key}") from None


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str | None) -> asyncio.Future[None]:
    return asyncio.ensure_future(_poll(url))


async def _poll(url: str | None) -> None:
    if url is None:
        return
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.25)
