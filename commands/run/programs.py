"""Runs agent programs, each as a process of its own: started anew, or forked from a server with warm imports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...client.no_proxy import reached_directly
from ...proxy.config.run import is_script, require_program
from ...proxy.errors import ConfigError, LightningError
from .group_guard import GRACE_S, signal_group
from .output import Keeping, piped
from .runner import CANNOT_START, Runner, RunTimedOut
from .served import ServedRunner
from .warden import Warden

PRELOAD = Path(__file__).with_name("preload.py")


class ProcessRunner:
    """Starts the command anew for each run, in a process group of its own."""

    def __init__(self, command: Sequence[str], keeping: Keeping | None = None) -> None:
        self._command, self._keeping, self._warden = tuple(command), keeping or Keeping(), Warden()

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        async with self._warden.awake() as tell, piped(log, self._keeping) as pipe:
            return await self._run(env, pipe, limit_s, tell)

    async def _run(self, env: Mapping[str, str], pipe: Path, limit_s: float | None, tell: Callable[[str], None]) -> int:
        with pipe.open("wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=_with_inherited(env),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:  # no shebang, a task too long for the environment
                output.write(f"{self._command[0]} cannot be started: {error.strerror}\n".encode())
                return CANNOT_START
        tell(f"+{process.pid}")
        try:
            async with asyncio.timeout(limit_s):
                return await process.wait()
        except TimeoutError:
            signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE_S)
            raise RunTimedOut("the program was ended") from None
        finally:
            signal_group(process.pid, signal.SIGKILL)
            await process.wait()
            tell(f"-{process.pid}")

    async def close(self) -> None:
        return


class PreloadRunner(ServedRunner):
    """Forks each run of `python script.py …` from one process that has already imported `modules` (preload.py)."""

    name = "preload server"

    def __init__(self, command: Sequence[str], modules: Sequence[str], keeping: Keeping | None = None) -> None:
        if not is_script(command):
            raise ConfigError(f"--preload needs a command of the form `python script.py …`, got: {' '.join(command)}")
        super().__init__([command[0], str(PRELOAD), command[1], *modules], keeping=keeping)
        self._command, self._modules = tuple(command), tuple(modules)

    async def _open(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        if not await child.stdout.readline():
            raise LightningError(f"--preload: {self._command[0]} cannot import {', '.join(self._modules)} (see above)")

    def _request(self, env: Mapping[str, str], log: Path) -> dict[str, Any]:
        script, argv = self._command[1], self._command[2:]
        return {"script": script, "argv": argv, "cwd": str(Path.cwd()), "env": _with_inherited(env), "log": str(log)}


def make_runner(command: Sequence[str], preload: Sequence[str] = (), keeping: Keeping | None = None) -> Runner:
    """Make the runner for a command line. ConfigError if it is empty, or names no program or no script."""
    if not command:
        raise ConfigError("run: no command given; put it after `--`")
    require_program(command)
    return PreloadRunner(command, preload, keeping) if preload else ProcessRunner(command, keeping)


def _with_inherited(env: Mapping[str, str]) -> dict[str, str]:
    """A program's variables and ours, without the proxy's and the upstreams' keys: it gets only its rollout's key."""
    secret = ("KEY", "UPSTREAMS")
    kept = {k: v for k, v in os.environ.items() if not (k.startswith("LIGHTNING_") and any(s in k for s in secret))}
    return kept | reached_directly(env, kept)
