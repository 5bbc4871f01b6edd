"""`experiment`: runs the lessons that have no result yet, and shows what all of them found.

A lesson is held-out tasks, training, and held-out tasks again, each by a command in a process of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from ...commands.api_client import ApiClient
from ...commands.eval.report import save
from ...commands.run.tasks import read_tasks
from ...commands.signals import Interrupted, run_until_signal
from ...commands.system.processes import Child, ChildDied, ChildSpec, Supervisor, free_port, make_directory, reason
from ...commands.system.steps import report_standstill
from ...commands.system.system import Launch
from ...commands.vllm import visible_gpus
from ...core.config.file import config_of
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ...core.statistics import RESAMPLES, Interval
from ...trainer.plan import cards
from .plan import Experiment, Json, LessonPlan, check_agent, flat, lessons_of, read_experiment, with_own

Work = Callable[[LessonPlan, Mapping[str, str], Callable[[str], None]], Awaitable[Json]]
HEAD = ("variant", "seeds", "before", "after", "95 %", "gain", "95 %", "above {}", "95 %", "minutes", "tokens")
OF_STEP = ("reward_mean", "rollouts", "groups_equal", "entropy", "staleness_mean", "step_s")
GROUPS_A_MINUTE = 10_000  # more than agents can work off


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


def cost(plan: Experiment, lessons: Sequence[LessonPlan], results: Mapping[str, Json], jobs: int) -> list[str]:
    """Return lines about runs, rollouts, calls, tokens and minutes."""
    left = [lesson for lesson in lessons if lesson.name not in results]
    held_out = 2 * len(read_tasks(plan.held_out)) * plan.samples
    train = f"{plan.rollouts} rollouts" if plan.rollouts else f"{plan.minutes:g} minutes"
    lines = [f"{len(lessons)} runs, {len(left)} to do; each trains for {train}, and evaluates {held_out} rollouts"]
    if results and left:
        calls, tokens = (sum(_mean(lesson, results, key) for lesson in left) for key in ("calls", "tokens"))
        minutes = sum(_mean(lesson, results, "minutes") for lesson in left) / jobs
        amount = f"{calls:.0f} calls, {tokens:.0f} tokens sampled in training, {minutes:.0f} minutes"
        lines.append(f"about {amount}, as measured on {len(results)} finished")
    elif left:
        least = f"{len(left) * (held_out + (plan.rollouts or 0))} calls"
        least += f" and {len(left) * plan.minutes / jobs:.0f} minutes" if plan.minutes else ""
        lines.append(f"at least {least}; once a run is finished, --dry-run says how long the others take")
    return lines


def _mean(lesson: LessonPlan, results: Mapping[str, Json], key: str) -> float:
    """The mean of the variant's finished lessons, or else of all."""
    own = [one for one in results.values() if one["variant"] == lesson.variant] or list(results.values())
    values = [sum(one["minutes"].values()) if key == "minutes" else one[key] for one in own]
    return sum(values) / len(values)


def show(results: Sequence[Json]) -> None:
    """Print a line for each variant: mean reward of the held-out tasks, and 95 % intervals over seeds and tasks."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    heads, *rows = lines(results)
    for head in heads:
        table.add_column(head, justify="left" if head == "variant" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console = console if console.is_terminal else Console(width=240, no_color=True)
    console.print(table)
    if alone := [name for name, seeds, *_ in rows if seeds == "1"]:
        console.print(
            f"one seed ({', '.join(alone)}): these intervals are over tasks only", markup=False, highlight=False
        )


def lines(results: Sequence[Json]) -> list[list[str]]:
    """Return the table's head, and a line for each variant. The last comparison is with the first variant, paired."""
    variants: dict[str, dict[int, Json]] = {}
    for one in results:
        variants.setdefault(one["variant"], {})[one["seed"]] = one
    first = next(iter(variants))
    found = [[head.format(first) for head in HEAD]]
    for name, seeds in variants.items():
        before, after = (_matrix(seeds, when) for when in ("before", "after"))
        both = [seed for seed in seeds if seed in variants[first]] if name != first else []
        above = _matrix({seed: seeds[seed] for seed in both}, "after") if both else None
        if above is not None:
            above = above - _matrix({seed: variants[first][seed] for seed in both}, "after")
        minutes = np.mean([sum(one["minutes"].values()) for one in seeds.values()])
        tokens = np.mean([one["tokens"] for one in seeds.values()])
        found.append([
            name, str(len(seeds)), f"{before.mean():.3f}", f"{after.mean():.3f}", _between(after),
            f"{(after - before).mean():+.3f}", _between(after - before),
            *(["", ""] if above is None else [f"{above.mean():+.3f}", _between(above)]),
            f"{minutes:.1f}", f"{tokens:.0f}",
        ])  # fmt: skip
    return found


def _matrix(seeds: Mapping[int, Json], when: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The mean reward of each held-out task: a row for each seed. All have the same tasks."""
    rows = [one["held_out"][when]["by_task"] for one in seeds.values()]
    return np.asarray([[row[task] for task in rows[0]] for row in rows], dtype=float)


def bootstrap_both(values: np.ndarray[tuple[int, int], np.dtype[np.float64]], seed: int = 0) -> Interval:
    """Return the 95 % interval of the mean of seeds x tasks; both are resampled, each by itself (Owen 2007).

    With one seed it says how sure the tasks are, and nothing of other seeds.
    """
    rng, (seeds, tasks) = np.random.default_rng(seed), values.shape
    by_task = rng.multinomial(seeds, [1 / seeds] * seeds, RESAMPLES) @ values / seeds
    means = (by_task * rng.multinomial(tasks, [1 / tasks] * tasks, RESAMPLES)).sum(axis=1) / tasks
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(low), float(high))


def _between(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> str:
    interval = bootstrap_both(values)
    return f"{interval.low:.3f} to {interval.high:.3f}"


def draw(results: Sequence[Json], path: Path) -> Path:
    """Save the curves: the rewards of each step, over the rollouts so far; dots: held-out tasks. LightningError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise LightningError("the curves need matplotlib: pip install 'lightning-proxy[demo]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(one["variant"] for one in results))}
    labelled: set[str] = set()
    for one in results:
        name, colour = one["variant"], colours[one["variant"]]
        steps = [step for step in one["steps"] if step["reward_mean"] is not None]
        seen = list(accumulate(step["rollouts"] for step in steps))
        label = None if name in labelled else name
        means = [step["reward_mean"] for step in steps]
        axes.plot(seen, means, marker=".", color=colour, alpha=0.6, linewidth=1, label=label)
        labelled.add(name)
        ends = [one["held_out"][when]["mean_reward"] for when in ("before", "after")]
        axes.plot([0, one["rollouts"]], ends, "o", color=colour, fillstyle="none")
    axes.set(xlabel="rollouts", ylabel="mean reward (rings: held-out tasks)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path


class AgentFails(LightningError):
    """Every program of the first evaluation failed."""


class Lesson:
    """Runs a lesson in its folder, which is emptied first. `env`: of its processes, such as which GPUs they see."""

    def __init__(
        self, experiment: Experiment, lesson: LessonPlan, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.plan, self._lesson, self.env, self.say = experiment, lesson, env, say
        self.directory, self.logs = lesson.directory, lesson.directory / "logs"
        self.launch = Launch(lesson.directory / "config.yaml")
        self.minutes: dict[str, float] = {}

    async def run(self) -> Json:
        """Return what is kept of the lesson. LightningError has the reason from a log; AgentFails is one."""
        config = self.prepare()
        async with Supervisor(self.logs, self.say) as servers:
            with self.timed("start"):
                for command, path in (("vllm", f"{config.vllm.port}/health"), ("serve", f"{config.proxy.port}/readyz")):
                    url, limit = f"http://127.0.0.1:{path}", config.vllm.start_timeout_s
                    spec = ChildSpec(command, self.launch.argv(command), self.env, url, limit)
                    await servers.wait_healthy(await servers.start(spec))
            return await servers.guard(self.stages(config))

    async def stages(self, config: Config) -> Json:
        """Do all that is done while vLLM and proxy serve, and return what is kept."""
        self.say("the held-out tasks are evaluated")
        before = await self.evaluate("before")
        self.say(f"held out {before['mean_reward']:.3f}; training")
        async with ApiClient.of(config, patience_s=60) as api:
            with self.timed("training"):
                await self.train(api)
            after = await self.evaluate("after")
            found = await self.found(api)
        self.say(
            f"held out {after['mean_reward']:.3f} after {found['rollouts']} rollouts, {found['steps_taken']} steps"
        )
        about = {"variant": self._lesson.variant, "seed": self._lesson.seed, "made_with": self._lesson.made_with}
        return about | {"held_out": {"before": before, "after": after}, "minutes": self.minutes} | found

    async def evaluate(self, name: str) -> Json:
        """Mean reward of the held-out tasks with the live version, and each task's own."""
        out = self.directory / f"{name}.json"
        asked = ["--tasks", str(self.plan.held_out), "--samples", str(self.plan.samples), "--out", str(out)]
        with self.timed("evaluations"):
            async with Supervisor(self.logs) as own:
                try:
                    await self.done(own, name, "eval", *asked, *self.agent())
                except ChildDied:
                    if name == "before" and _every_program_failed(out):
                        log = self.logs / f"{name}.log"
                        raise AgentFails(f"{reason(log)}; see {log}") from None
                    raise
        row = json.loads(out.read_text())["rows"][0]
        by_task = {task: found["mean_reward"] for task, found in row["by_task"].items()}
        kept = ("mean_reward", "interval", "policy_versions", "rollouts", "failed", "without_reward", "tokens")
        return {key: row[key] for key in kept} | {"by_task": by_task}

    async def train(self, api: ApiClient) -> None:
        """Let agents work and the trainer learn, until the rollouts or the minutes are used up."""
        minutes, tasks = self.plan.minutes, self.directory / "tasks.jsonl"
        work = ["--tasks", str(tasks), "--ahead", str(self.plan.ahead)]
        if minutes:
            work += ["--repeat", str(math.ceil(minutes * GROUPS_A_MINUTE / len(read_tasks(tasks))))]
        async with Supervisor(self.logs) as both:
            trainer = await both.start(self.spec("trainer", "train"))
            agents = await both.start(self.spec("agents", "run", *work, *self.agent()))
            telling = asyncio.ensure_future(report_standstill(trainer.log, self.say))
            ends = [asyncio.ensure_future(child.process.wait()) for child in (trainer, agents)]
            timeout = minutes * 60 if minutes else None
            try:
                await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                telling.cancel()
            stopped = (await api.policy())["collapse"] is not None
            if agents.process.returncode and not stopped:
                raise agents.death()
            done = trainer.process.returncode is not None  # trainer.max_steps
            for child in (agents, trainer):
                await _end(child, may_fail=child is agents)
        if not (done or stopped or minutes):
            async with Supervisor(self.logs) as rest:
                await self.done(rest, "trainer-rest", "train", "--once")

    async def found(self, api: ApiClient) -> Json:
        """What the proxy knows of the training."""
        policy = await api.policy()
        steps = (await api.request("GET", "/policy/steps", params={"limit": "1000"}))["data"]
        everything = [one async for one in api.every_rollout()]
        rollouts = [one for one in everything if one["mode"] == "train" and one["status"] != "discarded"]
        curve = [{"step": one["step"], **{key: one["metrics"].get(key) for key in OF_STEP}} for one in steps]
        return {
            "rollouts": len(rollouts),
            "trained_on": sum(one["step"] is not None for one in rollouts),
            "calls": sum(one["calls"] for one in everything),
            "tokens": sum(one["tokens"] for one in rollouts),
            "version": policy["live_version"],
            "steps_taken": policy["steps"],
            "collapse": policy["collapse"],
            "steps": sorted(curve, key=lambda one: one["step"]),
        }

    def prepare(self) -> Config:
        """Empty the folder; write configuration and tasks. Return the configuration."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.logs.mkdir(parents=True)
        settings = with_own(self._lesson.settings, self.directory, self._lesson.seed, free_port(), free_port())
        (self.directory / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        self.write_tasks()
        return config_of(settings)

    def write_tasks(self) -> None:
        """Write tasks.jsonl: the tasks in an order of the seed, as often as it takes."""
        lines = [task.line for task in read_tasks(self.plan.tasks)]
        group_size = self._lesson.config.trainer.group_size
        groups = len(lines) if self.plan.rollouts is None else self.plan.rollouts // group_size
        order = islice(_shuffled(lines, self._lesson.seed), groups)
        (self.directory / "tasks.jsonl").write_text("".join(f"{line}\n" for line in order))

    def spec(self, name: str, *command: str, **env: str) -> ChildSpec:
        """Return a command of lightning-proxy as a child, which logs to NAME.log."""
        return ChildSpec(name, self.launch.argv(*command), {**self.env, **env}, may_end=True)

    async def done(self, supervisor: Supervisor, name: str, *command: str, **env: str) -> None:
        """Run a command to its end. Raise ChildDied if it fails."""
        child = await supervisor.start(self.spec(name, *command, **env))
        if await child.process.wait():
            raise child.death()

    def agent(self, concurrency: int | None = None) -> list[str]:
        """Return how `run` and `eval` start it, as many programs at once as the experiment says, or `concurrency`."""
        preload = ["--preload", self.plan.preload] if self.plan.preload else []
        return [*preload, "--concurrency", str(concurrency or self.plan.concurrency), "--", *self.plan.agent]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the block's minutes."""
        started = time.monotonic()
        yield
        self.minutes[name] = round(self.minutes.get(name, 0.0) + (time.monotonic() - started) / 60, 2)


def _every_program_failed(evaluation: Path) -> bool:
    """Return whether an evaluation that failed got to its end."""
    rows = json.loads(evaluation.read_text())["rows"] if evaluation.is_file() else []
    return bool(rows) and all(row["complete"] and row["failed"] == row["rollouts"] for row in rows)


def _shuffled(lines: Sequence[str], seed: int) -> Iterator[str]:
    """All tasks in another order in each pass, without end."""
    order = random.Random(seed)
    while True:
        yield from order.sample(lines, len(lines))


async def _end(child: Child, *, may_fail: bool) -> None:
    """Ask a child to end, and wait: a trainer finishes its step. Raise ChildDied if it failed before it was asked."""
    if child.running:
        child.process.send_signal(signal.SIGINT)
        await child.process.wait()
    elif child.process.returncode and not may_fail:
        raise child.death()
