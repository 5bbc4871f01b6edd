"""The `run` command: agents work on tasks under a progress bar, and a summary is printed at the end."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from rich.console import Console

from ...core.config.root import Config
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...core.records import Mode
from ...trainer.credit.strategies import ACROSS_TASKS
from ..api_client import ApiClient, ApiError
from ..formats import duration, print_json
from ..signals import run_until_signal
from ..system.processes import make_directory
from .journal import fail_left
from .limits import Backlog, BacklogGate, Budget
from .report import Bar, ProgressView, by_name, names_table, no_calls, restarts_line, sentence, summarize
from .resume import KeptResults, kept_results
from .run import RolloutResult, RunOptions, require_success, run_tasks
from .runner import Runner, runner_for
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
        for line in filter(None, (restarts_line(results), no_calls(results), *run.warnings, budget.line())):
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
                        await self._warn()

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

    async def _warn(self) -> None:
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


def too_small(config: TrainerConfig, tasks: Sequence[Task], group_size: int) -> str | None:
    """Return the problem with groups of this size, and its fix. None if each rollout gets enough siblings.

    Several that are opened together are a group. Single ones become groups of `trainer.group_size` of a task.
    """
    siblings = group_size * min(Counter(task.task_id for task in tasks).values())
    if group_size > 1 or siblings >= config.group_size or config.baseline in ACROSS_TASKS:
        return None
    way_out = f"leave --group-size out, or give {config.group_size} (trainer.group_size)"
    if siblings == 1:
        if config.takes_lone_rollouts:
            return None
        return f"no step will be taken: each task gets one rollout, with nothing to compare it with; {way_out}"
    return (
        f"a task gets {siblings} rollouts, fewer than the {config.group_size} that the trainer compares: "
        f"the trainer waits {duration(config.group_timeout_s)} for the others; {way_out}"
    )


def too_few(config: TrainerConfig, tasks: Sequence[Task], group_size: int, waiting: int = 0) -> str | None:
    """Return what to do where there are fewer groups than a step takes; None if there are enough of them.

    `waiting`: rollouts of complete groups that wait for the trainer already.
    """
    siblings, there = Counter(task.task_id for task in tasks).values(), waiting // config.group_size
    groups = len(tasks) if group_size > 1 else sum(of_task // config.group_size for of_task in siblings)
    missing = config.tasks_per_step - there
    if not 0 < groups < missing or config.schedule.when in ("rollouts", "times"):  # a round's last step may be small
        return None
    comes = f"{groups} {'group comes' if groups == 1 else 'groups come'} of this" + f", {there} wait" * (there > 0)
    return (
        f"{comes}, and a step takes {config.tasks_per_step} "
        f"(trainer.tasks_per_step): if no others come, it waits {duration(config.group_timeout_s)} for them; "
        f"add tasks, or --repeat {math.ceil(missing / groups)}"
    )
