"""Runs agent programs, each as a process of its own: started anew, or forked from a server with warm imports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...proxy.errors import ConfigError, LightningError
from ...proxy.store.copies import make_private

CANNOT_START = 126  # what a shell answers
PRELOAD = Path(__file__).with_name("preload.py")
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")


class Runner(Protocol):
    """A way of running the agent program."""

    async def run(self, env: Mapping[str, str], log: Path) -> int:
        """Run it once and return its exit code, negative for a signal. Cancelling the call kills it.

        `log` gets its stdout and stderr.
        """

    async def close(self) -> None: ...


class ProcessRunner:
    """Starts the command anew for each run, in a process group of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def run(self, env: Mapping[str, str], log: Path) -> int:
        make_private(log)
        with log.open("wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env={**_inherited(), **env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:  # no shebang, a task too long for the environment
                output.write(f"{self._command[0]} cannot be started: {error.strerror}\n".encode())
                return CANNOT_START
        try:
            return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def close(self) -> None:
        return


class PreloadRunner:
    """Forks each run of `python script.py …` from one process that has already imported `modules` (preload.py)."""

    def __init__(self, command: Sequence[str], modules: Sequence[str]) -> None:
        if len(command) < 2 or not _PYTHON.fullmatch(Path(command[0]).name) or not command[1].endswith(".py"):
            raise ConfigError(f"--preload needs a command of the form `python script.py …`, got: {' '.join(command)}")
        self._command, self._modules = tuple(command), tuple(modules)
        self._server: asyncio.subprocess.Process | None = None
        self._running: dict[str, asyncio.Future[int]] = {}
        self._ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def run(self, env: Mapping[str, str], log: Path) -> int:
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
        name = str(next(self._ids))
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[name] = ended
        script, argv = self._command[1], self._command[2:]
        whole_env = {**_inherited(), **env}
        self._send(
            {"id": name, "script": script, "argv": argv, "cwd": str(Path.cwd()), "env": whole_env, "log": str(log)}
        )
        try:
            return await ended
        except asyncio.CancelledError:
            self._send({"kill": name})
            raise
        finally:
            del self._running[name]

    async def close(self) -> None:
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            await self._server.wait()
        if self._reader is not None:
            await self._reader

    async def _start(self) -> asyncio.subprocess.Process:
        server = await asyncio.create_subprocess_exec(
            *(self._command[0], str(PRELOAD), *self._modules),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdout is not None
        if not await server.stdout.readline():
            await server.wait()
            raise LightningError(f"--preload: {self._command[0]} cannot import {', '.join(self._modules)} (see above)")
        self._reader = asyncio.create_task(self._read(server.stdout))
        return server

    async def _read(self, reports: asyncio.StreamReader) -> None:
        async for line in reports:
            report = json.loads(line)
            ended = self._running.get(report["id"])
            if ended is not None and not ended.done():
                ended.set_result(report["code"])
        for ended in self._running.values():
            if not ended.done():
                ended.set_exception(LightningError("the preload server ended while programs were running"))

    def _send(self, request: dict[str, Any]) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")


def make_runner(command: Sequence[str], preload: Sequence[str] = ()) -> Runner:
    """Make the runner for a command line. ConfigError if it is empty or names no program."""
    if not command:
        raise ConfigError("run: no command given; put it after `--`")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"run: no program {command[0]!r} can be started")
    return PreloadRunner(command, preload) if preload else ProcessRunner(command)


def _inherited() -> dict[str, str]:
    """Our environment without the proxy's and the upstreams' keys: an agent gets only its rollout's key."""
    secret = ("KEY", "UPSTREAMS")
    return {k: v for k, v in os.environ.items() if not (k.startswith("LIGHTNING_") and any(s in k for s in secret))}
