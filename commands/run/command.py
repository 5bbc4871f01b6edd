"""The `run` command: agents work on tasks under a progress bar, and a summary is printed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from rich.console import Console

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.records import Mode
from ..api_client import ApiClient, ApiError
from ..formats import print_json
from ..signals import run_until_signal
from ..system.processes import make_directory
from .backlog import Backlog, BacklogGate
from .budget import Budget
from .executors.choose import runner_for
from .group_size import too_few, too_small
from .journal import fail_left
from .progress import Bar, ProgressView
from .resume import KeptResults, kept_results
from .run import RolloutResult, RunOptions, require_success, run_tasks
from .runner import Runner
from .summary import begun_anew, by_name, names_table, no_calls, sentence, summarize
from .tasks import Task, read_tasks

START_S = 5.0


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The options of the command line. `group_size` None means the trainer's, or 1 in mode eval.

    `ahead`: how many of the trainer's steps the rollouts may be ahead of the live version; None: any number.
    `resume`: the file that keeps results. `budget`: USD that all of it may cost.
    """

    tasks: Path
    command: list[str]
    preload: list[str]
    group_size: int | None
    concurrency: int
    mode: str
    repeat: int
    ahead: float | None
    resume: Path | None
    logs: Path | None
    as_json: bool
    budget: float | None = None


def run_command(config: Config, request: RunRequest) -> None:
    """Run the command. Raise LightningError if it fails, or if every program failed."""
    if request.mode not in ("train", "eval"):
        raise ConfigError(f"--mode is train or eval, got {request.mode!r}")
    if request.ahead is not None and request.mode != "train":
        raise ConfigError("--ahead cannot be used with --mode eval: such rollouts are not trained on")
    tasks, console, trainer = read_tasks(request.tasks) * request.repeat, Console(stderr=True), config.trainer
    view = ProgressView(console)
    runner = runner_for(config, request.command, request.preload, view.say)
    group_size = request.group_size or (trainer.group_size if request.mode == "train" else 1)
    options = RunOptions(
        group_size, request.concurrency, cast(Mode, request.mode), logs_directory(request.logs),
        score_timeout_s=score_timeout_s(config), timeout_s=config.run.timeout_s,
    )  # fmt: skip
    wrong = too_small(trainer, tasks, group_size) if request.mode == "train" else None
    if wrong is not None:
        console.print(wrong, markup=False, style="yellow")
    few = partial(too_few, trainer, tasks, group_size) if request.mode == "train" and wrong is None else None
    api = ApiClient.of(config, patience_s=60)
    gate: BacklogGate | None = None
    if request.ahead is not None:
        limit = int((1 + request.ahead) * trainer.group_size * trainer.tasks_per_step)
        gate = Backlog(api, limit, group_size, view.say)
    budget = Budget(request.budget)
    with nullcontext() if request.resume is None else kept_results(request.resume) as kept:
        run = _Run(api, tasks, runner, options, view, gate, budget, kept, few)
        results = run_until_signal(run.work())
    if request.as_json:
        print_json(summarize(results) | budget.summary())
    else:
        console.print(sentence(results), markup=False)
        if (table := names_table({config.policy.alias: by_name(results)})) is not None:
            console.print(table)
        for line in filter(None, (begun_anew(results), no_calls(results), *run.warnings, budget.line())):
            console.print(line, markup=False, style="yellow")
    if results or not budget.left_out:
        require_success(results)
    budget.require()


def score_timeout_s(config: Config) -> float | None:
    """Return how long to wait for the proxy's rewarders, which also start in that time; None without any."""
    longest = config.longest_wait_s
    return None if longest is None else longest + START_S


def logs_directory(path: Path | None) -> Path | None:
    """Make the directory for the programs' output. Its path is absolute: a program may change its directory."""
    return make_directory(path, "--logs") if path is not None else None


@dataclass(slots=True)
class _Run:
    """The work of the command. `warnings`: lines to print at its end.

    `too_few`: what is wrong with its number of groups beside so many rollouts that wait.
    """

    api: ApiClient
    tasks: list[Task]
    runner: Runner
    options: RunOptions
    view: ProgressView
    gate: BacklogGate | None
    budget: Budget
    kept: KeptResults | None
    too_few: Callable[[int], str | None] | None
    warnings: list[str] = field(default_factory=list)

    async def work(self) -> list[RolloutResult]:
        size = self.options.group_size
        with self.view:
            async with self.api as api:
                if failed := await fail_left(api):
                    self.view.say(f"{failed} rollouts of a run that was killed have failed")
                if self.too_few and (wrong := self.too_few((await api.request("GET", "/status")).get("waiting", 0))):
                    self.view.console.print(wrong, markup=False, style="yellow")
                left, earlier = await self._left(api, size)
                bar = self.view.bar("rollouts", sum(size - len(task.siblings) for task in left))
                try:
                    await self.budget.begin(api, 0.0 if self.kept is None else self.kept.usd)
                    how = (self.options, self._take(bar), self.gate, self.budget, self._open)
                    return earlier + await run_tasks(api, left, self.runner, *how)
                finally:
                    await asyncio.shield(self.runner.close())
                    if self.options.mode == "train":
                        await self._tell()

    async def _left(self, api: ApiClient, size: int) -> tuple[list[Task], list[RolloutResult]]:
        """Return the tasks that are left, and the results of earlier runs."""
        if self.kept is None:
            return self.tasks, []
        await self.kept.look(api)
        return self.kept.left(self.tasks, size), self.kept.results

    def _open(self, rollout_ids: Sequence[str], beside: str | None) -> None:
        if self.kept is not None:
            self.kept.opened(rollout_ids, beside)

    def _take(self, bar: Bar) -> Callable[[RolloutResult], None]:
        def take(result: RolloutResult) -> None:
            bar.add(result)
            if self.kept is not None:
                self.kept.add(result)

        return take

    async def _tell(self) -> None:
        """Say whether the trainer learns nothing any more."""
        with suppress(ApiError):
            status = await self.api.request("GET", "/status")
            if standstill := status.get("standstill"):
                self.warnings.append(standstill["story"])
            if missing := status.get("unrewarded"):
                self.warnings.append(
                    f"{missing} completed rollouts of the newest 200 have no reward, so no step takes them: none "
                    "came, or a rewarder failed: the proxy's log says where"
                )
