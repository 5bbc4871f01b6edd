"""`experiment`: runs the lessons that have no result yet, and shows what all of them found."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from ...commands.eval.report import save
from ...commands.signals import Interrupted, run_until_signal
from ...commands.system.processes import make_directory
from ...commands.vllm import visible_gpus
from ...core.errors import ConfigError, LightningError
from ...trainer.plan.settle import cards
from .cost import cost
from .lesson import AgentFails, Lesson
from .plan import Experiment, Json, LessonPlan, check_agent, flat, lessons_of, read_experiment
from .report import draw, show

Work = Callable[[LessonPlan, Mapping[str, str], Callable[[str], None]], Awaitable[Json]]


def experiment(file: Path, config: Path | None, directory: Path, jobs: int, *, dry_run: bool) -> None:
    """Run the command. Raise LightningError if a lesson failed."""
    found = read_experiment(file, config)
    lessons = lessons_of(found, directory)
    results, gpus = results_of(lessons), gpus_of(jobs)
    if len(results) < len(lessons):
        check_agent(found, lessons[0].config)
    if dry_run:
        typer.echo("\n".join(cost(found, lessons, results, jobs)))
        return
    os.umask(0o077)
    with _locked(make_directory(directory, "--dir")):
        results = results_of(lessons)
        failed = _run(found, lessons, results, gpus)
    if results:
        show([results[lesson.name] for lesson in lessons if lesson.name in results])
        try:
            say(f"curves: {draw(list(results.values()), directory / 'curves.png')}")
        except LightningError as error:
            say(error.message)
        say(f"all runs in a browser: lightning-proxy dashboard --store {directory}")
    if failed:
        raise LightningError(
            f"{len(failed)} of {len(lessons)} runs failed: {'; '.join(failed)}; the same command tries again"
        )


def _run(
    found: Experiment, lessons: Sequence[LessonPlan], results: dict[str, Json], gpus: list[Mapping[str, str]]
) -> list[str]:
    async def work(lesson: LessonPlan, env: Mapping[str, str], tell: Callable[[str], None]) -> Json:
        return await Lesson(found, lesson, env, tell).run()

    try:
        return run_until_signal(run_lessons(lessons, results, gpus, work))
    except Interrupted:
        done = f"{len(results)} of {len(lessons)} runs are finished"
        raise Interrupted(f"stopped: {done}; the same command does the others") from None


def say(what: str) -> None:
    """Print a line beside the results."""
    typer.echo(what, err=True)


async def run_lessons(
    lessons: Sequence[LessonPlan], results: dict[str, Json], slots: Sequence[Mapping[str, str]], work: Work
) -> list[str]:
    """Run the lessons without a result, as many at once as there are `slots`, and save each one's result.

    Return the names of those that failed; the others go on. AgentFails if the agent has never worked yet.
    """
    free: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()
    failed: list[str] = []
    for slot in slots:
        free.put_nowait(slot)

    async def one(lesson: LessonPlan) -> None:
        env = await free.get()
        try:
            say(f"{lesson.name}: started ({len(results)} of {len(lessons)} finished); logs in {lesson.directory}/logs/")
            result = await work(lesson, env, lambda what: say(f"{lesson.name}: {what}"))
            save(result, lesson.result)
            results[lesson.name] = result
        except LightningError as error:
            if isinstance(error, AgentFails) and not results:
                raise AgentFails(f"{lesson.name}: {error.message}; no further run is begun") from None
            failed.append(lesson.name)
            say(f"{lesson.name}: failed: {error.message}")
        free.put_nowait(env)

    try:
        async with asyncio.TaskGroup() as group:
            for lesson in lessons:
                if lesson.name not in results:
                    group.create_task(one(lesson))
    except* AgentFails as errors:
        raise errors.exceptions[0] from None
    return failed


def results_of(lessons: Sequence[LessonPlan]) -> dict[str, Json]:
    """Return the finished lessons' results. ConfigError if one was made with something else than the file has now."""
    found: dict[str, Json] = {}
    for lesson in lessons:
        if lesson.result.is_file():
            try:
                found[lesson.name] = json.loads(lesson.result.read_text())
                before, now = flat(found[lesson.name]["made_with"]), flat(lesson.made_with)
            except (ValueError, KeyError):
                raise ConfigError(f"{lesson.result} is no run's result: remove it to do the run again") from None
            keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
            if keys:
                was, is_ = ({key: repr(one[key]) if key in one else "not set" for key in keys} for one in (before, now))
                changes = "; ".join(f"{key} was {was[key]} and is {is_[key]}" for key in keys)
                raise ConfigError(
                    f"{lesson.name} is finished, and was made with something else: {changes}. Put that back, choose "
                    f"another --dir, or remove {lesson.result} to run it again"
                )
    return found


def gpus_of(jobs: int) -> list[Mapping[str, str]]:
    """Return the variables of each of the jobs: without GPUs there are none, otherwise the GPUs are shared out."""
    gpus = list(cards()) if jobs > 1 else []
    if gpus and len(gpus) < jobs:
        raise ConfigError(f"--jobs {jobs}: there are {len(gpus)} GPUs, and each run needs one at least")
    each = len(gpus) // jobs
    return [visible_gpus(gpus[job * each : (job + 1) * each]) for job in range(jobs)]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raise LightningError if another `experiment` works there."""
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LightningError(f"another `experiment` works in {directory}") from None
        yield
