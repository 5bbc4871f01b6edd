"""The `run` command as a person sees it: a progress bar while it runs, a summary at its end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...proxy.config.root import Config
from ...proxy.config.trainer import TrainerConfig
from ...proxy.errors import ConfigError, LightningError
from ..api_client import ApiClient
from ..signals import run_until_signal
from ..system.processes import make_directory
from .backlog import Backlog
from .programs import Runner, make_runner
from .run import Gate, RolloutResult, RunOptions, run_tasks
from .summary import sentence, summarize
from .tasks import Task, read_tasks


@dataclass
class RunProgress:
    """Counts results for the progress bar."""

    progress: Progress
    total: int
    label: str = "rollouts"
    done: int = 0
    failed: int = 0
    rewarded: int = 0
    reward: float = 0.0

    def __post_init__(self) -> None:
        self._bar = self.progress.add_task(self.label, total=self.total, reward="-", failed=0)

    def add(self, result: RolloutResult) -> None:
        self.done += 1
        self.failed += result.failed
        if result.reward is not None:
            self.rewarded += 1
            self.reward += result.reward
        mean = f"{self.reward / self.rewarded:.3f}" if self.rewarded else "-"
        self.progress.update(self._bar, completed=self.done, reward=mean, failed=self.failed)


def progress_bars(console: Console) -> Progress:
    """Bars for `RunProgress`."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("reward {task.fields[reward]}"))
    more = (TextColumn("failed {task.fields[failed]}"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, *more, console=console)


async def run_with_progress(
    api: ApiClient,
    tasks: list[Task],
    runner: Runner,
    options: RunOptions,
    console: Console,
    gate: Gate | None = None,
) -> list[RolloutResult]:
    """`run_tasks` under a progress bar with the mean reward so far."""
    with progress_bars(console) as progress:
        counts = RunProgress(progress, len(tasks) * options.group_size)
        async with api:
            try:
                return await run_tasks(api, tasks, runner, options, counts.add, gate)
            finally:
                await asyncio.shield(runner.close())


def repeated(tasks: list[Task], repeat: int) -> list[Task]:
    """All tasks, `repeat` times over."""
    return [task for _ in range(repeat) for task in tasks]


def logs_directory(path: Path | None) -> Path | None:
    """Where the programs' output is kept, made absolute: a program may change its directory."""
    return make_directory(path, "--logs") if path is not None else None


def run_command(
    config: Config,
    path: Path,
    command: list[str],
    preload: list[str],
    repeat: int,
    as_json: bool,
    options: dict[str, Any],
    ahead: float | None = None,
) -> None:
    """Everything the command does; raises LightningError if it could not, or if every program failed.

    `ahead`: how many of the trainer's steps the rollouts may be ahead of the live version; None: any number.
    """
    if options["mode"] not in ("train", "eval"):
        raise ConfigError(f"--mode is train or eval, got {options['mode']!r}")
    if ahead is not None and options["mode"] != "train":
        raise ConfigError("--ahead: nothing is trained on rollouts of --mode eval")
    tasks, runner = repeated(read_tasks(path), repeat), make_runner(command, preload)
    console = Console(stderr=True)
    run_options = RunOptions(**{**options, "logs": logs_directory(options["logs"])})
    api = ApiClient.of(config, patience_s=60)
    gate = None if ahead is None else _backlog(api, config.trainer, run_options.group_size, ahead, console)
    results = run_until_signal(run_with_progress(api, tasks, runner, run_options, console, gate))
    if as_json:
        print(json.dumps(summarize(results)))
    else:
        console.print(sentence(results), markup=False)
    if all(result.failed for result in results):
        raise LightningError("every program failed")


def _backlog(api: ApiClient, trainer: TrainerConfig, group_size: int, ahead: float, console: Console) -> Backlog:
    return Backlog(api, int((1 + ahead) * trainer.group_size * trainer.tasks_per_step), group_size, console.print)
