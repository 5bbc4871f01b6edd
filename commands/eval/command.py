"""The `eval` command as a person sees it: a bar for each model, a table, and the file with all numbers."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...proxy.config.root import Config
from ...proxy.errors import LightningError
from ..api_client import ApiClient
from ..run.command import RunProgress, logs_directory, progress_bars
from ..run.programs import Runner, make_runner
from ..run.run import RolloutResult, RunOptions
from ..run.tasks import Task, read_tasks
from ..signals import run_until_signal
from .eval import Evaluation, Row, parse_models
from .power import serving_power
from .report import Scoring, check_writable, print_tables, report, save


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What the command line asked for."""

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


def eval_command(config: Config, asked: EvalRequest) -> None:
    """Everything the command does; raises LightningError if it could not, or if every program failed."""
    models, tasks = parse_models(asked.models), read_tasks(asked.tasks)
    if asked.out is not None:
        check_writable(asked.out)
    runner, console = make_runner(asked.command, asked.preload), Console(stderr=True)
    options = RunOptions(asked.samples, asked.concurrency, "eval", logs_directory(asked.logs))
    api = ApiClient.of(config, patience_s=60)
    power = serving_power(config, [model.name for model in models])
    evaluation = Evaluation(api, runner, options, models, promote=asked.promote, say=console.print)
    try:
        run_until_signal(_with_progress(api, runner, evaluation, power, tasks, asked.samples, console))
    finally:
        _show(evaluation, asked)
    if all(result.failed for row in evaluation.rows for result in row.results):
        raise LightningError("every program failed")


async def _with_progress(
    api: ApiClient,
    runner: Runner,
    evaluation: Evaluation,
    power: AbstractAsyncContextManager[None],
    tasks: list[Task],
    samples: int,
    console: Console,
) -> None:
    with progress_bars(console) as progress:
        bars: dict[str, RunProgress] = {}

        def on_result(row: Row, result: RolloutResult) -> None:
            name = row.model.name
            if name not in bars:
                bars[name] = RunProgress(progress, len(tasks) * samples, name)
            bars[name].add(result)

        async with api, power:
            try:
                await evaluation.run(tasks, on_result)
            finally:
                await asyncio.shield(runner.close())


def _show(evaluation: Evaluation, asked: EvalRequest) -> None:
    """What there is, also of an evaluation that was stopped."""
    if not any(row.results for row in evaluation.rows):
        return
    about = {
        "created_at": time.time(), "tasks": str(asked.tasks), "samples": asked.samples, "command": asked.command,
    }  # fmt: skip
    found = report(evaluation.rows, asked.scoring, about)
    if asked.out is not None:
        save(found, asked.out)
    if asked.as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print_tables(found)
        _explain(found, asked)


def _explain(found: dict[str, object], asked: EvalRequest) -> None:
    passed = f"passed: reward >= {asked.scoring.pass_at:g}; without a reward: 0"
    print(f"{passed}" + (f"; all numbers: {asked.out}" if asked.out is not None else ""))
