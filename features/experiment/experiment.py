"""`experiment`: runs each lesson (a variant with a seed) that has no result yet, and shows all results."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
import math
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
import typer
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from rich.console import Console

from ...commands.api_client import ApiClient
from ...commands.files import save_json
from ...commands.formats import table
from ...commands.run.runner import runner_for
from ...commands.run.tasks import read_tasks
from ...commands.signals import Interrupted, run_until_signal
from ...commands.system.processes import make_directory
from ...commands.trial import Json, Trial, Work, draw, merged
from ...commands.vllm import require_model, visible_gpus
from ...core.config import file as config_file
from ...core.config.file import config_of, load_config, read_config, read_yaml, variables
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ...core.statistics import bootstrap_mean
from ...store.opening import opened
from ...store.sqlite.file import lock_file
from ...store.store import Store
from ...trainer.functions import check_functions, own_functions
from ...trainer.plan import cards
from ...trainer.plugins import Run, check

Env = Mapping[str, str]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]
HEAD = (
    "variant", "seeds", "before", "after", "95 %", "gain", "95 %", "above {}", "95 %", "each seed", "tasks", "samples",
    "minutes", "tokens",
)  # fmt: skip
SEEDS = 5  # with fewer, intervals over seeds are too narrow
GROUPS_A_MINUTE = 10_000  # more than agents can work off
# Each lesson has its own.
OWN = ("proxy.host", "proxy.port", "vllm.port", "store.url", "policy.directory", "trainer.seed")
Variant = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Experiment(Work):
    config: Path | None = None
    rollouts: Annotated[int, Field(ge=1)] | None = None
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    variants: Annotated[dict[Name, Variant], Field(min_length=1)]

    @model_validator(mode="after")
    def _makes_sense(self) -> Experiment:
        if (self.rollouts is None) == (self.minutes is None):
            raise ValueError("give either rollouts or minutes, which set how long each run trains")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: give each seed once")
        return self


@dataclass(frozen=True, slots=True)
class LessonPlan:
    """One variant with one seed. `made_with`: what must not change once the lesson has a result."""

    variant: str
    seed: int
    directory: Path
    settings: Json
    config: Config
    made_with: Json

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def result(self) -> Path:
        return self.directory / "result.json"


def read_experiment(file: Path, config: Path | None) -> Experiment:
    """Return the experiment in a file. `config` is used if the file names none. Raises ConfigError for wrong keys."""
    try:
        found = Experiment.model_validate({"config": config} | read_yaml(file))
    except ValidationError as error:
        raise ConfigError(config_file.lines(error, Experiment, file, {})) from None
    read_tasks(found.tasks), read_tasks(found.held_out)
    return found


def lessons_of(experiment: Experiment, directory: Path) -> list[LessonPlan]:
    """Return all lessons: every variant with one seed, then with the next. Raises ConfigError if one cannot be run."""
    base = read_config(experiment.config)
    config_of(deepcopy(base), path=experiment.config)
    shared = experiment.model_dump(mode="json", exclude={"config", "seeds", "variants"}, exclude_none=True)
    made: dict[str, tuple[Json, Config, Json]] = {}
    for name, changes in experiment.variants.items():
        settings, config = _variant(name, base, changes, experiment.rollouts)
        kept = flat(config.model_dump(mode="json", exclude_defaults=True))
        own = {key: value for key, value in kept.items() if key not in OWN}
        made[name] = settings, config, {"config": own, "files": _files(experiment, config)}
    return [
        LessonPlan(name, seed, directory.absolute() / name / f"seed-{seed}", settings, config, shared | made_with)
        for seed in experiment.seeds
        for name, (settings, config, made_with) in made.items()
    ]


def _variant(name: str, base: Json, changes: Json, rollouts: int | None) -> tuple[Json, Config]:
    """A variant's settings, checked as its lessons' commands will check them."""
    label = f"variant {name}"
    settings = merged(base, changes)
    config = config_of(deepcopy(settings), path=Path(label))
    try:
        keys = {*flat(changes), *OWN}
        for variable, key in variables():
            if hidden := next((one for one in sorted(keys) if f"{one}.".startswith(f"{key}.")), None):
                raise ConfigError(f"the variable {variable} would override {hidden}; unset it")
        if own := next((one for one in OWN if one in flat(changes)), None):
            raise ConfigError(f"{own}: each run has its own; leave it out")
        require_model(config)
        check(config, Run())
        check_functions(config.trainer)
        if not {"trainer.loss", "trainer.context_loss"}.isdisjoint(dict(own_functions(config.trainer))):
            from ...trainer.step.losses import check_gradients  # imports torch

            check_gradients(config.trainer)
        upstream = config.policy_upstream
        urls = upstream.urls if upstream is not None and not upstream.servers else ()
        if len(urls) != 1 or urlsplit(urls[0]).port != config.vllm.port:
            raise ConfigError("upstreams: each run starts one vLLM; leave out replicas, and use the port of vllm.port")
        if config.run.proxy_url is not None:
            raise ConfigError("run.proxy_url: each run has its own proxy; leave it out")
        if rollouts is not None and rollouts % config.trainer.group_size:
            raise ConfigError(f"trainer.group_size {config.trainer.group_size} does not divide {rollouts} rollouts")
    except LightningError as error:
        raise ConfigError(f"{label}: {error.message}") from None
    return settings, config


def _files(experiment: Experiment, config: Config) -> dict[str, str]:
    """Hashes of the task files, of files named in the agent's command line, and of files with the user's functions."""
    own = [name for _, name in own_functions(config.trainer)] + [config.rewards.function or ""]
    words = [*experiment.agent, *(name.rpartition(":")[0] for name in own)]
    files = [experiment.tasks, experiment.held_out, *map(Path, words)]
    found = {str(path): path.expanduser() for path in files}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in found.items() if path.is_file()}


def flat(data: Mapping[str, Any], before: str = "") -> Json:
    """Return every value by its dotted key."""
    found: Json = {}
    for key, value in data.items():
        name = f"{before}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def experiment(file: Path, config: Path | None, directory: Path, jobs: int, *, dry_run: bool) -> None:
    plan = read_experiment(file, config)
    lessons, gpus = lessons_of(plan, directory), gpus_of(jobs)
    results = results_of(lessons)
    if len(results) < len(lessons):
        try:
            runner_for(lessons[0].config, plan.agent, plan.preload.split(",") if plan.preload else [], print)
        except ConfigError as error:
            raise ConfigError(f"agent: {error.message}") from None
    if dry_run:
        typer.echo(cost(plan, len(lessons) - len(results), [*results.values()], jobs))
        return
    os.umask(0o077)
    with lock_file(make_directory(directory, "--dir") / ".experiment", "lock") as is_ours:
        if not is_ours:
            raise LightningError(f"another `experiment` is running in {directory}")
        results = results_of(lessons)
        try:
            failed = run_until_signal(run_lessons(plan, lessons, results, gpus))
        except Interrupted:
            done = f"{len(results)} of {len(lessons)} runs are finished"
            raise Interrupted(f"stopped: {done}; run the same command to do the others") from None
    if results:
        finished = [results[lesson.name] for lesson in lessons if lesson.name in results]
        console = Console()
        (first, *others), *rows = lines(finished)
        shown = table(first, right=others)
        for row in rows:
            shown.add_row(*row)
        console = console if console.is_terminal else Console(width=240, no_color=True)
        console.print(shown)
        if warning := few_seeds(finished):
            console.print(warning, markup=False, highlight=False, soft_wrap=True)
        write(finished, directory)
        say(f"the table: {directory}/results.md, .csv and .json")
        try:
            draw(finished, directory / "curves.png")
            say(f"curves: {directory / 'curves.png'}")
        except LightningError as error:
            say(error.message)
        say(f"one run in a browser: lightning-proxy dashboard --store {directory}/VARIANT/seed-N/lightning.db")
    if failed:
        raise LightningError(
            f"{len(failed)} of {len(lessons)} runs failed: {'; '.join(failed)}; run the same command to try again"
        )


def say(what: str, lesson: str = "") -> None:
    """Print a progress line to stderr, apart from the results."""
    typer.echo(f"{lesson}: {what}" if lesson else what, err=True)


async def run_lessons(
    plan: Experiment, lessons: Sequence[LessonPlan], results: dict[str, Json], slots: Sequence[Env]
) -> list[str]:
    """Run lessons without a result, one per slot at a time, and add their results. Return the failed ones' names."""
    left = iter([lesson for lesson in lessons if lesson.name not in results])
    failed: list[str] = []

    async def use(env: Env) -> None:
        for lesson in left:
            finished = f"{len(results)} of {len(lessons)} finished"
            say(f"started ({finished}); logs in {lesson.directory}/logs/", lesson.name)
            try:
                result = await Lesson(plan, lesson, env, partial(say, lesson=lesson.name)).run()
                save_json(result, lesson.result)
                results[lesson.name] = result
            except LightningError as error:
                failed.append(lesson.name)
                say(f"failed: {error.message}", lesson.name)

    async with asyncio.TaskGroup() as group:
        for env in slots:
            group.create_task(use(env))
    return failed


def results_of(lessons: Sequence[LessonPlan]) -> dict[str, Json]:
    """Return finished lessons' results by name. Raises ConfigError if one is unreadable or made with other settings."""
    results: dict[str, Json] = {}
    for lesson in lessons:
        if not lesson.result.is_file():
            continue
        try:
            results[lesson.name] = json.loads(lesson.result.read_text())
            before, now = flat(results[lesson.name]["made_with"]), flat(lesson.made_with)
        except (ValueError, KeyError):
            raise ConfigError(f"{lesson.result} is not the result of a run: remove it to do the run again") from None
        changes = [
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if changes:
            raise ConfigError(
                f"{lesson.name} is finished, but with different settings or files: {'; '.join(changes)}. Restore them, "
                f"choose another --dir, or remove {lesson.result} to run it again"
            )
    return results


def gpus_of(jobs: int) -> list[Env]:
    """Return each job's environment variables, which divide the GPUs. Raises ConfigError if these are too few."""
    gpus = list(cards()) if jobs > 1 else []
    if gpus and len(gpus) < jobs:
        raise ConfigError(f"--jobs {jobs}: there are {len(gpus)} GPUs, and each run needs at least one")
    each = len(gpus) // jobs
    return [visible_gpus(gpus[job * each : (job + 1) * each]) for job in range(jobs)]


def cost(plan: Experiment, left: int, finished: Sequence[Json], jobs: int) -> str:
    """Describe what the remaining lessons will cost, estimated from finished ones if there are any."""
    held_out = 2 * len(read_tasks(plan.held_out)) * plan.samples
    train = f"{plan.rollouts} rollouts" if plan.rollouts else f"{plan.minutes:g} minutes"
    runs = f"{left} runs to do; each trains for {train}, and evaluates {held_out} rollouts"
    if not left:
        return "all runs are finished"
    if not finished:
        return f"{runs}\nonce a run is finished, --dry-run says how many minutes and GiB the others take"
    tokens, gib = (left * fmean(one[key] for one in finished) for key in ("tokens", "gib"))
    minutes = left * fmean(map(minutes_of, finished)) / jobs
    amounts = f"{minutes:.0f} minutes, {gib:.1f} GiB on the disk, {tokens:.0f} tokens sampled in training"
    return f"{runs}\nabout {amounts}, estimated from {len(finished)} finished runs"


def minutes_of(result: Json) -> float:
    return float(sum(result["minutes"].values()))


def lines(results: Sequence[Json]) -> list[list[str]]:
    """Return the table's header and a line per variant. `above`: the paired difference from the first variant."""
    variants: dict[str, dict[int, Json]] = {}
    for one in sorted(results, key=lambda one: int(one["seed"])):
        variants.setdefault(one["variant"], {})[one["seed"]] = one
    first = results[0]["variant"]
    rows = [[head.format(first) for head in HEAD]]
    for name in dict.fromkeys(one["variant"] for one in results):
        seeds, baseline = variants[name], variants[first]
        before, after = rewards(seeds, [*seeds], "before"), rewards(seeds, [*seeds], "after")
        both, above = [seed for seed in seeds if seed in baseline and name != first], ("", "")
        if both:
            above = _mean(rewards(seeds, both, "after") - rewards(baseline, both, "after"), "+")
        rows.append([
            name, str(len(seeds)), _mean(before)[0], *_mean(after), *_mean(after - before, "+"), *above,
            " ".join(f"{value:.3f}" for value in after.mean(axis=1)), str(after.shape[1]),
            str(next(iter(seeds.values()))["made_with"]["samples"]),
            f"{np.mean([minutes_of(one) for one in seeds.values()]):.1f}",
            f"{np.mean([one['tokens'] for one in seeds.values()]):.0f}",
        ])  # fmt: skip
    return rows


def few_seeds(results: Sequence[Json]) -> str | None:
    seeds = Counter(one["variant"] for one in results)
    few = [f"{name} has {count}" for name, count in seeds.items() if count < SEEDS]
    why = "the intervals of these variants are too narrow, and with one seed they are over tasks only"
    return f"fewer than {SEEDS} seeds ({', '.join(few)}): {why}" if few else None


def rewards(results: Mapping[int, Json], seeds: Sequence[int], when: str) -> Matrix:
    """Return the mean reward of each held-out task, a row per seed. All rows have the same tasks."""
    rows = [results[seed]["held_out"][when]["by_task"] for seed in seeds]
    return np.asarray([[row[task] for task in rows[0]] for row in rows], dtype=float)


def _mean(values: Matrix, sign: str = "") -> tuple[str, str]:
    interval = bootstrap_mean(values)
    return f"{values.mean():{sign}.3f}", f"{interval.low:.3f} to {interval.high:.3f}"


def write(results: Sequence[Json], directory: Path) -> None:
    """Write results.md (the table), results.csv (a line per run) and results.json (everything, with settings)."""
    head, *rows = lines(results)
    table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    text = "".join(f"| {' | '.join(row)} |\n" for row in table)
    note = "Mean rewards of held-out tasks, with 95 % intervals by the bootstrap over seeds and tasks."
    (directory / "results.md").write_text(
        "\n\n".join([text.rstrip(), note, *filter(None, [few_seeds(results)])]) + "\n"
    )
    with (directory / "results.csv").open("w", newline="") as file:
        sheet = csv.writer(file)
        sheet.writerow(("variant", "seed", "before", "after", "tasks", "rollouts", "steps", "tokens", "minutes"))
        for one in results:
            ends = [one["held_out"][when]["mean_reward"] for when in ("before", "after")]
            amounts = (one["rollouts"], len(one["steps"]), one["tokens"], round(minutes_of(one), 2))
            sheet.writerow((one["variant"], one["seed"], *ends, len(one["held_out"]["after"]["by_task"]), *amounts))
    packages = {one.name: one.version for one in distributions()}
    save_json({"packages": dict(sorted(packages.items())), "runs": results}, directory / "results.json")


def commit() -> str | None:
    """Return the working directory's commit, with `-dirty` after local changes; None without git or a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Lesson(Trial):
    """Empties a lesson's folder, and runs the lesson there."""

    def __init__(self, plan: Experiment, lesson: LessonPlan, env: Env, say: Callable[[str], None]) -> None:
        super().__init__(plan, lesson.directory, say, env)
        self.plan, self.lesson = plan, lesson
        if plan.minutes:
            self.passes = math.ceil(plan.minutes * GROUPS_A_MINUTE / len(read_tasks(plan.tasks)))

    async def run(self) -> Json:
        self.begin()
        about = {"variant": self.lesson.variant, "seed": self.lesson.seed, "made_with": self.lesson.made_with}
        found: Json = about | {"commit": commit()} | await super().run()
        bytes_ = sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())
        return found | {"gib": round(bytes_ / 2**30, 3)}

    async def stages(self, config: Config) -> Json:
        found = await super().stages(config)
        await self.tidy({found["version"], found["best_version"]})
        return found

    async def ended(self, api: ApiClient) -> None:
        await asyncio.sleep(self.plan.minutes * 60 if self.plan.minutes else math.inf)

    def begin(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.logs.mkdir(parents=True)
        rollouts, group_size = self.plan.rollouts, self.lesson.config.trainer.group_size
        groups = len(read_tasks(self.work.tasks)) if rollouts is None else rollouts // group_size
        self.prepare(self.lesson.settings, self.lesson.seed, groups)

    async def tidy(self, kept: Container[int]) -> None:
        """Remove all versions' weights except those of `kept`, and all checkpoints except theirs and the newest."""
        shutil.rmtree(self.directory / "policy" / "checkpoints" / "0", ignore_errors=True)  # of the base model
        async with opened(load_config(self.launch.path).store) as database:
            store = Store(database)
            for version in await store.versions.with_files():
                if version.version not in kept:
                    await store.versions.forget_files(version.version)
                    shutil.rmtree(self.directory / "policy" / "versions" / f"v{version.version}", ignore_errors=True)
            for step, checkpoint in await store.steps.old_checkpoints(1):
                await store.steps.forget_checkpoint(step)
                shutil.rmtree(checkpoint, ignore_errors=True)
