"""The `run` command: lets agents work on tasks, shows the progress, and prints a summary at the end."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config.root import Config
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...core.records import Mode
from ..api_client import ApiClient, ApiError
from ..formats import duration, print_json
from ..signals import run_until_signal
from ..system.processes import make_directory
from .limits import Backlog, Budget, Observer
from .report import ProgressView, by_name, names_table, sentences, summarize
from .resume import OpenedRollouts, opened_rollouts
from .run import RolloutResult, RunOptions, require_success, run_tasks
from .runner import Runner, runner_for
from .tasks import Task, read_tasks

START_S = 5.0  # in which the proxy's rewarders start


def run_command(
    config: Config,
    command: Sequence[str],
    *,
    tasks: Path,
    preload: Sequence[str],
    group_size: int | None,
    concurrency: int,
    mode: Mode,
    repeat: int,
    ahead: float | None,
    budget_usd: float | None,
    resume: Path | None,
    logs: Path | None,
    as_json: bool,
) -> None:
    """Run the command. Raise LightningError if it fails, or if every program failed.

    `group_size` None means the trainer's, or 1 in mode eval. `ahead`: how many training steps the rollouts may be ahead
    of the live version; None: any number. `resume`: the file that lists the rollouts that were opened.
    """
    trains, trainer, view = mode == "train", config.trainer, ProgressView(Console(stderr=True))
    if ahead is not None and not trains:
        raise ConfigError("--ahead cannot be used with --mode eval: eval rollouts are not trained on")
    every = read_tasks(tasks) * repeat
    runner = runner_for(config, command, preload, view.say)
    size = group_size or (trainer.group_size if trains else 1)
    options = run_options(config, size, concurrency, mode, logs)
    api = ApiClient.of(config, patience_s=60)
    budget, notes = Budget(api, budget_usd), list[str]()
    observers: list[Observer] = [budget]
    if ahead is not None:
        most = int((1 + ahead) * trainer.group_size * trainer.tasks_per_step)
        observers.append(Backlog(api, most, size, view.say))

    async def work(earlier: OpenedRollouts) -> list[RolloutResult]:
        async with programs(api, runner, view):
            if failed := await earlier.look(api):
                view.say(f"{failed} rollouts of the stopped run were ended as failed; their tasks begin again")
            if trains:
                waiting = (await api.request("GET", "/status")).get("waiting", 0)
                if (wrong := problem(trainer, every, size, waiting)) is not None:
                    view.say(wrong, "yellow")
            left, budget.earlier = earlier.left(every, size), earlier.usd
            bar = view.bar("rollouts", sum(size - len(task.siblings) for task in left))
            results = await run_tasks(api, left, runner, options, bar.add, *observers, earlier)
            with suppress(ApiError):
                await budget.look()
                notes.extend(standing(await api.request("GET", "/status")) if trains else ())
        return earlier.results + results

    with opened_rollouts(resume) as earlier:
        results = run_until_signal(work(earlier))
    if as_json:
        print_json(summarize(results) | ({} if budget_usd is None else {"usd": budget.spent}))
    else:
        summary, warnings = sentences(results)
        view.console.print(summary, markup=False)
        if (names := names_table({config.policy.alias: by_name(results)})) is not None:
            view.console.print(names)
        if budget_usd is not None:
            notes.append(f"{budget.spent:.4g} of {budget_usd:g} USD spent")
        for line in (*warnings, *notes):
            view.say(line, "yellow")
    if results or not budget.left_out:
        require_success(results)
    budget.require()


def run_options(config: Config, group_size: int, concurrency: int, mode: Mode, logs: Path | None) -> RunOptions:
    """Return the options of a run, and create the directory `logs` if one is given."""
    longest = config.longest_wait_s
    return RunOptions(
        group_size,
        concurrency,
        mode,
        logs=None if logs is None else make_directory(logs, "--logs"),
        score_timeout_s=None if longest is None else longest + START_S,
        timeout_s=config.run.timeout_s,
    )


@asynccontextmanager
async def programs(api: ApiClient, runner: Runner, view: ProgressView) -> AsyncIterator[None]:
    """Open `api` and show progress bars during the block. Close the runner after it."""
    with view:
        async with api:
            try:
                yield
            finally:
                await asyncio.shield(runner.close())


def standing(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons, if any, why the recorded rollouts lead to no training step."""
    if standstill := status.get("standstill"):
        yield standstill["story"]
    if missing := status.get("unrewarded"):
        yield (
            f"{missing} completed rollouts of the newest 200 have no reward, so no step takes them: none came with a "
            "name that trainer.reward_weights counts, or a rewarder failed (see the proxy's log)"
        )


def problem(config: TrainerConfig, tasks: Sequence[Task], group_size: int, waiting: int = 0) -> str | None:
    """Return why these tasks lead to no training step, or to a late one, with the fix; None if all is well.

    Rollouts that are opened together are a group. Single rollouts of a task become groups of `trainer.group_size`.
    `waiting`: rollouts in complete groups that already wait for the trainer.
    """
    passes = Counter(task.task_id for task in tasks).values()
    siblings, needed, patience = group_size * min(passes), config.group_size, duration(config.group_timeout_s)
    if group_size == 1 and siblings < needed and config.compare == "task":
        way_out = f"leave --group-size out, or set it to {needed} (trainer.group_size)"
        if siblings > 1:
            return (
                f"a task gets {siblings} rollouts, fewer than the {needed} that the trainer compares: "
                f"the trainer waits {patience} for the others; {way_out}"
            )
        if not config.takes_lone_rollouts:
            return f"no step will be taken: each task gets one rollout, with nothing to compare it with; {way_out}"
    groups = len(tasks) if group_size > 1 else sum(n // needed for n in passes)
    missing = config.tasks_per_step - waiting // needed
    if not 0 < groups < missing or config.schedule.when in ("rollouts", "times"):  # a round's last step may be small
        return None
    return (
        f"a step takes {config.tasks_per_step} groups (trainer.tasks_per_step), and this run adds {groups} "
        f"of the {missing} that are missing: the trainer waits {patience} for the others; "
        f"add tasks, or --repeat {math.ceil(missing / groups)}"
    )
