"""Runs the agent program: on this machine, forked from a server, or wherever `run.executor` says."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from ...client.program import variables
from ...core import guard
from ...core.config.file import inherited
from ...core.config.rollouts import is_script, require_program
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ..command_line import brought
from ..formats import how_it_ended
from .output import Redact, last_line, piped, redaction

SERVER = Path(__file__).with_name("fork_server.py")


class ServerDied(LightningError):
    """The process or the machine that ran the program is gone, and so is the program."""


class RunTimedOut(LightningError):
    """The program exceeded its time limit and was stopped."""


class Runner(Protocol):
    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        """Run the program once and return its exit code, negative for a signal. Cancelling kills the program.

        `log` gets its stdout and stderr. After `limit_s`, its process group gets SIGTERM, then SIGKILL, and RunTimedOut
        is raised. Raises ServerDied if the machine or one of our processes goes away, LightningError if no run can
        continue. Nothing that the program started is left running.
        """

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Run:
    ended: asyncio.Future[int]
    limit: asyncio.Timeout
    limit_s: float | None


class ServedRunner(ABC):
    """Runs programs through a child process. The first run starts the child, which ends when its stdin closes.

    The child's first line says that it is ready, or {"failed": why}. It then gets a request with an `id` for each run,
    and {"kill": id} ends one. Its reports are {"id", "started"}, {"id", "code"}, {"id", "lost": why}, {"say": what} for
    a person, or {"failed": why}, which fails all runs. If the child dies, the next run starts a new one.
    """

    name = "server"
    setup = b""  # what it reads before it is ready
    cannot_start = ""  # what to say if it ends before

    def __init__(self, argv: Sequence[str], say: Callable[[str], None], redact: Redact | None) -> None:
        self._argv, self._say, self._redact = tuple(argv), say, redact
        self._child: Process | None = None
        self._life: asyncio.Task[LightningError] | None = None  # of the child
        self._runs: dict[str, _Run] = {}
        self._ids = itertools.count()
        self._starting = asyncio.Lock()

    @abstractmethod
    def _request(self, env: Mapping[str, str], log: Path) -> dict[str, Any]:
        """Return the request that starts a run in the child."""

    def _ready(self, report: Mapping[str, Any]) -> None:  # noqa: B027 - most need nothing of it
        """Read the child's first line."""

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        loop, name = asyncio.get_running_loop(), str(next(self._ids))
        async with piped(log, self._redact) as pipe:
            async with self._starting:
                if self._life is None or self._life.done():
                    ready = loop.create_future()
                    self._life = asyncio.create_task(self._live(ready))
                    await asyncio.wait({ready, self._life}, return_when=asyncio.FIRST_COMPLETED)
                    if self._life.done():
                        raise self._life.result()
            request = {"id": name, **self._request(env, pipe)}
            run = self._runs[name] = _Run(loop.create_future(), asyncio.timeout(None), limit_s)
            self._send(request)
            try:
                async with run.limit:
                    return await asyncio.shield(run.ended)
            except TimeoutError:
                self._send({"kill": name})
                with suppress(ServerDied):
                    await run.ended
                raise RunTimedOut("the program exceeded its time limit and was stopped") from None
            except asyncio.CancelledError:
                self._send({"kill": name})
                raise
            finally:
                del self._runs[name]

    async def close(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life})

    async def _live(self, ready: asyncio.Future[None]) -> LightningError:
        """Start a child and read its reports until it ends. Then fail the runs that are left, and return the error."""
        with TemporaryDirectory(prefix="lightning-server-") as directory:
            log = Path(directory) / "output.log"
            async with piped(log, self._redact) as pipe:
                with pipe.open("wb") as output:
                    child = self._child = await asyncio.create_subprocess_exec(
                        *self._argv, stdin=PIPE, stdout=PIPE, stderr=output, env=inherited(), start_new_session=True
                    )
                assert child.stdin is not None and child.stdout is not None
                try:
                    child.stdin.write(self.setup)
                    why = await self._read(child.stdout, ready)
                finally:
                    if not ready.done():
                        with suppress(ProcessLookupError):
                            child.kill()
                    child.stdin.close()
                    code = await child.wait()
            if why is not None:
                error = LightningError(why)
            elif ready.done():
                error = ServerDied(f"the {self.name} died ({how_it_ended(code)}), last output: {last_line(log)}")
                self._say(f"{error.message}. {len(self._runs)} programs failed; the server is started again")
            else:
                error = LightningError(f"{self.cannot_start or f'the {self.name} cannot be started'}: {last_line(log)}")
                sys.stderr.write(log.read_text(errors="replace"))
        for run in self._runs.values():
            if not run.ended.done():
                run.ended.set_exception(error)
        return error

    async def _read(self, reports: asyncio.StreamReader, ready: asyncio.Future[None]) -> str | None:
        """Read reports until the child ends. Return the reason if it says that no run can continue."""
        async for line in reports:
            report = json.loads(line)
            run = self._runs.get(report.get("id", ""))
            if "failed" in report:
                return str(report["failed"])
            if "say" in report:
                self._say(report["say"])
            elif not ready.done():
                self._ready(report)
                ready.set_result(None)
            elif run is None:  # it was cancelled
                continue
            elif "lost" in report:
                run.ended.set_exception(ServerDied(report["lost"]))
            elif "code" in report:
                run.ended.set_result(report["code"])
            elif run.limit_s is not None:
                run.limit.reschedule(asyncio.get_running_loop().time() + run.limit_s)
        return None

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")


class LocalRunner(ServedRunner):
    """Starts the command for each run. With `modules`, imports them once, then forks `python script.py …`.

    Raises ConfigError if there is no such program or script, or if `modules` are given for another kind of command.
    """

    def __init__(
        self,
        command: Sequence[str],
        modules: Sequence[str] = (),
        redact: Redact | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        require_program(command)
        if modules and not is_script(command):
            raise ConfigError(f"--preload needs a command of the form `python script.py …`, got: {' '.join(command)}")
        python = [command[0]] if modules else [sys.executable, "-I", "-S"]
        warm = [command[1], *modules] if modules else []
        super().__init__([*python, str(SERVER), guard.__file__, *warm], say, redact)
        self._command = tuple(command)
        self.name = "preload server" if modules else "fork server"
        if modules:
            self.cannot_start = f"--preload: {command[0]} cannot import {', '.join(modules)}"

    def _request(self, env: Mapping[str, str], log: Path) -> dict[str, Any]:
        found = variables(env, inherited(), log.with_name("task.json"))
        return {"argv": self._command, "cwd": str(Path.cwd()), "env": found, "log": str(log)}


def runner_for(config: Config, command: Sequence[str], preload: Sequence[str], say: Callable[[str], None]) -> Runner:
    """Make the runner for a command line. Raise ConfigError if it cannot work. `say` prints messages to the user."""
    if not command:
        raise ConfigError("no command given; put it after `--`")
    if config.run.executor == "local":
        return LocalRunner(command, preload, redaction(config), say)
    if preload:
        raise ConfigError(f"--preload needs run.executor: local, not {config.run.executor}")
    for make in brought("executor"):
        if (runner := make(config, command, say)) is not None:
            return runner
    raise ConfigError(f"run.executor: there is no executor {config.run.executor}")
