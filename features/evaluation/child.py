"""Runs `lightning-proxy eval` as a process of its own, which begins a rollout whenever it is allowed to."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.errors import LightningError
from .config import EvaluationConfig

CONCURRENCY = 4
NICE = 10  # agents' programs and the trainer have the processors first
GRACE_S = 10.0  # to discard its rollouts
TRACKED = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID")  # say which run is the trainer's: no agent goes on with it


class NotEvaluated(LightningError):
    """The command failed, or was not done in time."""


class EvalProcess:
    """Evaluates a version. The directory gets the command's log and its result."""

    def __init__(self, config: EvaluationConfig, file: Path | None, directory: Path) -> None:
        """`file`: the configuration's."""
        self._config, self._file = config, file
        self._log, self._out = directory / "evaluation.log", directory / "evaluation.json"

    def argv(self, version: int) -> Sequence[str]:
        config = ["--config", str(self._file)] if self._file is not None else []
        which = ["--tasks", str(self._config.tasks), "--models", str(version), "--samples", str(self._config.samples)]
        how = ["--concurrency", str(CONCURRENCY), "--out", str(self._out), "--paced", "--"]
        return [sys.executable, "-m", "lightning_proxy.cli", *config, "eval", *which, *how, *self._config.command]

    async def run(self, version: int, allowed: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        """Return the version's row of the result. It awaits `allowed` before each rollout. Raises NotEvaluated."""
        self._out.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in TRACKED}
        with self._log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self.argv(version), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=env, start_new_session=True,
            )  # fmt: skip
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        letting_in = asyncio.create_task(_let_in(process, allowed))
        try:
            async with asyncio.timeout(self._config.timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise NotEvaluated(f"it was not done after {self._config.timeout_s:g} s (evaluation.timeout_s)") from None
        finally:
            letting_in.cancel()
            await asyncio.gather(letting_in, return_exceptions=True)
            await asyncio.shield(_end(process))
        if code != 0 or not self._out.is_file():
            raise NotEvaluated(f"{self._last_line()} (exit code {code}); see {self._log}")
        row: dict[str, Any] = json.loads(self._out.read_text())["rows"][0]
        return row

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        return next((line[:300] for line in reversed(lines) if line), "no output")


async def _let_in(process: asyncio.subprocess.Process, allowed: Callable[[], Awaitable[None]]) -> None:
    """Let a rollout in when it is allowed, and while fewer than `CONCURRENCY` have begun and not ended."""
    assert process.stdin is not None and process.stdout is not None
    begun = 0
    with suppress(ConnectionError):
        while True:
            await allowed()
            process.stdin.write(b"\n")
            await process.stdin.drain()
            begun += 1
            if begun >= CONCURRENCY:
                await process.stdout.readline()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the command if it runs. It ends by itself, and discards its rollouts, when its input does."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(GRACE_S):
            await process.communicate()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
