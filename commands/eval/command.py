"""The `eval` command: a progress bar for each model, a table at the end, and a file with all numbers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...core.config.root import Config
from ...core.errors import ConfigError
from ..api_client import ApiClient
from ..formats import print_json
from ..run.command import logs_directory, score_timeout_s
from ..run.limits import BacklogGate
from ..run.report import Bar, ProgressView
from ..run.run import RolloutResult, RunOptions, require_success
from ..run.runner import Runner, runner_for
from ..run.tasks import Task, read_tasks
from ..signals import run_until_signal
from .eval import EvalRow, Evaluation, parse_models
from .report import Scoring, check_writable, print_tables, report, save


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The options of the command line. `paced`: standard input says when each rollout may begin."""

    tasks: Path
    models: str
    command: list[str]
    preload: list[str]
    samples: int
    concurrency: int
    promote: bool
    scoring: Scoring
    out: Path | None
    logs: Path | None
    as_json: bool
    paced: bool = False


def eval_command(config: Config, request: EvalRequest) -> None:
    """Run the command. Raise LightningError if it fails, or if every program failed."""
    models, tasks = parse_models(request.models), read_tasks(request.tasks)
    if request.out is not None:
        check_writable(request.out)
    counted = [name for name, weight in config.trainer.training_weights.items() if weight]
    if why_not := config.not_absolute(counted):
        raise ConfigError(why_not)
    view = ProgressView(Console(stderr=True))
    runner = runner_for(config, request.command, request.preload, view.say)
    logs, limit_s = logs_directory(request.logs), score_timeout_s(config)
    gate, samples = (PacedGate(), 1) if request.paced else (None, request.samples)
    tasks = tasks * (request.samples // samples)  # so that each rollout is let in by itself
    options = RunOptions(
        samples, request.concurrency, "eval", logs, score_timeout_s=limit_s, timeout_s=config.run.timeout_s
    )
    api = ApiClient.of(config, patience_s=60)
    evaluation = Evaluation(api, runner, options, models, promote=request.promote, say=view.say, gate=gate)
    try:
        run_until_signal(_run(api, gate or nullcontext(), runner, evaluation, tasks, view, samples))
    finally:
        _show(evaluation, request)
    require_success([result for row in evaluation.rows for result in row.results])


async def _run(
    api: ApiClient,
    gate: AbstractAsyncContextManager[None],
    runner: Runner,
    evaluation: Evaluation,
    tasks: list[Task],
    view: ProgressView,
    samples: int,
) -> None:
    bars: dict[str, Bar] = {}

    def on_result(row: EvalRow, result: RolloutResult) -> None:
        name = row.model.name
        if name not in bars:
            bars[name] = view.bar(name, len(tasks) * samples)
        bars[name].add(result)

    with view:
        async with api, gate:
            try:
                await evaluation.run(tasks, on_result)
            finally:
                await asyncio.shield(runner.close())


def _show(evaluation: Evaluation, request: EvalRequest) -> None:
    """Print and save the results so far, also of an evaluation that was stopped."""
    if not any(row.results for row in evaluation.rows):
        return
    about = {
        "created_at": time.time(), "tasks": str(request.tasks), "samples": request.samples, "command": request.command,
    }  # fmt: skip
    found = report(evaluation.rows, request.scoring, about)
    if request.out is not None:
        save(found, request.out)
    if request.as_json:
        print_json(found)
    elif not request.paced:
        print_tables(found)
        numbers = f"; all numbers: {request.out}" if request.out is not None else ""
        print(f"passed: reward >= {request.scoring.pass_at:g}; a rollout without a reward counts as 0{numbers}")


class PacedGate(BacklogGate):
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

    async def wait(self) -> None:
        await self._lines.acquire()

    def ended(self, rollout_id: str) -> None:
        print(rollout_id, flush=True)

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        for _ in range(data.count(b"\n")):
            self._lines.release()
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)
