"""The `eval` command: a progress bar for each model, a table at the end, and a file with all numbers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config.root import Config
from ...core.errors import ConfigError
from ..api_client import ApiClient
from ..formats import print_json
from ..run.command import programs, run_options
from ..run.limits import Observer
from ..run.report import ProgressView
from ..run.run import require_success
from ..run.runner import runner_for
from ..run.tasks import read_tasks
from ..signals import run_until_signal
from .eval import evaluate, parse_models
from .report import check_writable, print_tables, report, save


def eval_command(
    config: Config,
    command: Sequence[str],
    *,
    tasks: Path,
    models: str,
    preload: Sequence[str],
    samples: int,
    concurrency: int,
    promote: bool,
    pass_at: float,
    seed: int,
    out: Path | None,
    logs: Path | None,
    as_json: bool,
    paced: bool,
) -> None:
    """Run the command. Raise LightningError if it fails, or if every program failed.

    `paced`: standard input says when each rollout may begin. What is known is shown and saved, however it ends.
    """
    rows, read = parse_models(models), read_tasks(tasks)
    if out is not None:
        check_writable(out)
    if why_not := config.not_absolute([name for name, weight in config.trainer.training_weights.items() if weight]):
        raise ConfigError(why_not)
    view = ProgressView(Console(stderr=True))
    runner = runner_for(config, command, preload, view.say)
    # Where each rollout is let in by itself, it is a group of its own.
    options = run_options(config, 1 if paced else samples, concurrency, "eval", logs)
    read = read * (samples if paced else 1)

    async def work() -> None:
        api, gate = ApiClient.of(config, patience_s=60), PacedGate() if paced else Observer()
        async with programs(api, runner, view), gate if isinstance(gate, PacedGate) else nullcontext():
            await evaluate(api, read, runner, options, rows, view, gate, promote=promote)

    try:
        run_until_signal(work())
    finally:
        if any(row.results for row in rows):
            about = {"created_at": time.time(), "tasks": str(tasks), "samples": samples, "command": command}
            numbers = report(rows, pass_at, seed, about)
            if out is not None:
                save(numbers, out)
            if as_json:
                print_json(numbers)
            elif not paced:
                print_tables(numbers)
                more = f"; all numbers: {out}" if out is not None else ""
                print(f"passed: reward >= {pass_at:g}; a rollout without a reward counts as 0{more}")
    require_success([result for row in rows for result in row.results])


class PacedGate(Observer):
    """Lets one group begin for each line of standard input. At its end the command ends, as by SIGTERM."""

    def __init__(self) -> None:
        self._lines = asyncio.Semaphore(0)

    async def __aenter__(self) -> None:
        try:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)
        except PermissionError:  # a file, or /dev/null
            raise ConfigError("--paced: standard input must be a pipe or a terminal") from None

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())

    async def wait(self) -> bool:
        return await self._lines.acquire()

    def ended(self, rollout: Mapping[str, Any]) -> None:
        print(rollout["rollout_id"], flush=True)

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        for _ in range(data.count(b"\n")):
            self._lines.release()
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)
