"""`experiment`: runs the lessons that have no result yet, and shows what all of them found."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import typer
from rich.console import Console

from ...commands.api_client import ApiClient
from ...commands.eval.report import save
from ...commands.formats import table
from ...commands.run.tasks import read_tasks
from ...commands.signals import Interrupted, run_until_signal
from ...commands.system.processes import make_directory
from ...commands.trial import AgentFails, Json, Trial, draw
from ...commands.vllm import visible_gpus
from ...core.errors import ConfigError, LightningError
from ...core.statistics import RESAMPLES, Interval
from ...store.sqlite.file import lock_file
from ...trainer.plan import cards
from .plan import Experiment, LessonPlan, check_agent, flat, lessons_of, read_experiment

Env = Mapping[str, str]
RunLesson = Callable[[LessonPlan, Env, Callable[[str], None]], Awaitable[Json]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]
HEAD = ("variant", "seeds", "before", "after", "95 %", "gain", "95 %", "above {}", "95 %", "minutes", "tokens")
GROUPS_A_MINUTE = 10_000  # more than agents can work off


def experiment(file: Path, config: Path | None, directory: Path, jobs: int, *, dry_run: bool) -> None:
    """Run the command. Raise LightningError if a lesson failed."""
    plan = read_experiment(file, config)
    lessons = lessons_of(plan, directory)
    results, gpus = results_of(lessons), gpus_of(jobs)
    if len(results) < len(lessons):
        check_agent(plan, lessons[0].config)
    if dry_run:
        typer.echo("\n".join(cost(plan, lessons, results, jobs)))
        return

    async def work(lesson: LessonPlan, env: Env, tell: Callable[[str], None]) -> Json:
        return await Lesson(plan, lesson, env, tell).run()

    os.umask(0o077)
    with lock_file(make_directory(directory, "--dir") / ".experiment", "lock") as is_ours:
        if not is_ours:
            raise LightningError(f"another `experiment` works in {directory}")
        results = results_of(lessons)
        try:
            failed = run_until_signal(run_lessons(lessons, results, gpus, work))
        except Interrupted:
            done = f"{len(results)} of {len(lessons)} runs are finished"
            raise Interrupted(f"stopped: {done}; the same command does the others") from None
    if results:
        show([results[lesson.name] for lesson in lessons if lesson.name in results])
        try:
            draw(list(results.values()), directory / "curves.png")
            say(f"curves: {directory / 'curves.png'}")
        except LightningError as error:
            say(error.message)
        say(f"all runs in a browser: lightning-proxy dashboard --store {directory}")
    if failed:
        raise LightningError(
            f"{len(failed)} of {len(lessons)} runs failed: {'; '.join(failed)}; the same command tries again"
        )


def say(what: str) -> None:
    """Print a line beside the results."""
    typer.echo(what, err=True)


def _tell(name: str, what: str) -> None:
    say(f"{name}: {what}")


async def run_lessons(
    lessons: Sequence[LessonPlan], results: dict[str, Json], slots: Sequence[Env], work: RunLesson
) -> list[str]:
    """Run the lessons without a result, as many at once as there are `slots`, and save each one's result.

    Return the names of those that failed; the others go on. AgentFails if the agent has never worked yet.
    """
    left = iter([lesson for lesson in lessons if lesson.name not in results])
    failed: list[str] = []

    async def use(env: Env) -> None:
        for lesson in left:
            say(f"{lesson.name}: started ({len(results)} of {len(lessons)} finished); logs in {lesson.directory}/logs/")
            try:
                result = await work(lesson, env, partial(_tell, lesson.name))
                save(result, lesson.result)
                results[lesson.name] = result
            except LightningError as error:
                if isinstance(error, AgentFails) and not results:
                    raise AgentFails(f"{lesson.name}: {error.message}; no further run is begun") from None
                failed.append(lesson.name)
                say(f"{lesson.name}: failed: {error.message}")

    try:
        async with asyncio.TaskGroup() as group:
            for env in slots:
                group.create_task(use(env))
    except* AgentFails as errors:
        raise errors.exceptions[0] from None
    return failed


def results_of(lessons: Sequence[LessonPlan]) -> dict[str, Json]:
    """Return the finished lessons' results. ConfigError if one was made with something else than the file has now."""
    results: dict[str, Json] = {}
    for lesson in lessons:
        if not lesson.result.is_file():
            continue
        try:
            results[lesson.name] = json.loads(lesson.result.read_text())
            before, now = flat(results[lesson.name]["made_with"]), flat(lesson.made_with)
        except (ValueError, KeyError):
            raise ConfigError(f"{lesson.result} is no run's result: remove it to do the run again") from None
        changes = [
            f"{key} was {repr(before[key]) if key in before else 'not set'} and is "
            f"{repr(now[key]) if key in now else 'not set'}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if changes:
            raise ConfigError(
                f"{lesson.name} is finished, and was made with something else: {'; '.join(changes)}. Put that back, "
                f"choose another --dir, or remove {lesson.result} to run it again"
            )
    return results


def gpus_of(jobs: int) -> list[Env]:
    """Return the variables of each of the jobs: without GPUs there are none, otherwise the GPUs are shared out."""
    gpus = list(cards()) if jobs > 1 else []
    if gpus and len(gpus) < jobs:
        raise ConfigError(f"--jobs {jobs}: there are {len(gpus)} GPUs, and each run needs one at least")
    each = len(gpus) // jobs
    return [visible_gpus(gpus[job * each : (job + 1) * each]) for job in range(jobs)]


def cost(plan: Experiment, lessons: Sequence[LessonPlan], results: Mapping[str, Json], jobs: int) -> list[str]:
    """Return lines about runs, rollouts, calls, tokens and minutes."""
    left = [lesson for lesson in lessons if lesson.name not in results]
    held_out = 2 * len(read_tasks(plan.held_out)) * plan.samples
    train = f"{plan.rollouts} rollouts" if plan.rollouts else f"{plan.minutes:g} minutes"
    lines = [f"{len(lessons)} runs, {len(left)} to do; each trains for {train}, and evaluates {held_out} rollouts"]
    if results and left:
        runs, each = len(left), [*results.values()]
        calls, tokens = (runs * fmean(one[key] for one in each) for key in ("calls", "tokens"))
        minutes = runs * fmean(sum(one["minutes"].values()) for one in each) / jobs
        amount = f"{calls:.0f} calls, {tokens:.0f} tokens sampled in training, {minutes:.0f} minutes"
        lines.append(f"about {amount}, as measured on {len(results)} finished")
    elif left:
        least = f"{len(left) * (held_out + (plan.rollouts or 0))} calls"
        least += f" and {len(left) * plan.minutes / jobs:.0f} minutes" if plan.minutes else ""
        lines.append(f"at least {least}; once a run is finished, --dry-run says how long the others take")
    return lines


def show(results: Sequence[Json]) -> None:
    """Print a line for each variant: mean reward of the held-out tasks, and 95 % intervals over seeds and tasks."""
    (first, *others), *rows = lines(results)
    shown = table(first, right=others)
    for row in rows:
        shown.add_row(*row)
    console = Console()
    console = console if console.is_terminal else Console(width=240, no_color=True)
    console.print(shown)
    if alone := [name for name, seeds, *_ in rows if seeds == "1"]:
        told = f"one seed ({', '.join(alone)}): these intervals are over tasks only"
        console.print(told, markup=False, highlight=False)


def lines(results: Sequence[Json]) -> list[list[str]]:
    """Return the table's head, and a line for each variant. The last comparison is with the first variant, paired."""
    variants: dict[str, dict[int, Json]] = {}
    for one in results:
        variants.setdefault(one["variant"], {})[one["seed"]] = one
    first, baseline = next(iter(variants.items()))
    rows = [[head.format(first) for head in HEAD]]
    for name, seeds in variants.items():
        before, after = rewards(seeds, [*seeds], "before"), rewards(seeds, [*seeds], "after")
        both = [seed for seed in seeds if seed in baseline and name != first]
        above = rewards(seeds, both, "after") - rewards(baseline, both, "after") if both else None
        minutes = np.mean([sum(one["minutes"].values()) for one in seeds.values()])
        tokens = np.mean([one["tokens"] for one in seeds.values()])
        rows.append([
            name, str(len(seeds)), f"{before.mean():.3f}", f"{after.mean():.3f}", _between(after),
            f"{(after - before).mean():+.3f}", _between(after - before),
            "" if above is None else f"{above.mean():+.3f}", "" if above is None else _between(above),
            f"{minutes:.1f}", f"{tokens:.0f}",
        ])  # fmt: skip
    return rows


def rewards(results: Mapping[int, Json], seeds: Sequence[int], when: str) -> Matrix:
    """Return the mean reward of each held-out task: a row for each seed. All have the same tasks."""
    rows = [results[seed]["held_out"][when]["by_task"] for seed in seeds]
    return np.asarray([[row[task] for task in rows[0]] for row in rows], dtype=float)


def bootstrap_both(values: Matrix, seed: int = 0) -> Interval:
    """Return the 95 % interval of the mean of seeds x tasks; both are resampled, each by itself (Owen 2007).

    With one seed it says how sure the tasks are, and nothing of other seeds.
    """
    rng, (seeds, tasks) = np.random.default_rng(seed), values.shape
    by_task = rng.multinomial(seeds, [1 / seeds] * seeds, RESAMPLES) @ values / seeds
    means = (by_task * rng.multinomial(tasks, [1 / tasks] * tasks, RESAMPLES)).sum(axis=1) / tasks
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(low), float(high))


def _between(values: Matrix) -> str:
    interval = bootstrap_both(values)
    return f"{interval.low:.3f} to {interval.high:.3f}"


class Lesson(Trial):
    """Runs a lesson in its folder, which is emptied first."""

    def __init__(self, plan: Experiment, lesson: LessonPlan, env: Env, say: Callable[[str], None]) -> None:
        super().__init__(plan, lesson.directory, say, env)
        self.plan, self.lesson = plan, lesson
        if plan.minutes:
            self.passes = math.ceil(plan.minutes * GROUPS_A_MINUTE / len(read_tasks(plan.tasks)))

    async def run(self) -> Json:
        self.begin()
        about = {"variant": self.lesson.variant, "seed": self.lesson.seed, "made_with": self.lesson.made_with}
        return about | await super().run()

    async def ended(self, api: ApiClient) -> None:
        await asyncio.sleep(self.plan.minutes * 60 if self.plan.minutes else math.inf)

    def begin(self) -> None:
        """Empty the folder, and write configuration and tasks."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.logs.mkdir(parents=True)
        rollouts, group_size = self.plan.rollouts, self.lesson.config.trainer.group_size
        groups = len(read_tasks(self.work.tasks)) if rollouts is None else rollouts // group_size
        self.prepare(self.lesson.settings, self.lesson.seed, groups)
