"""The `eval` command: runs held-out tasks with one model after another, and compares the results.

A rollout without a reward counts as reward 0 and as not passed, since an agent that gave no answer has not solved its
task. The tables also show how many such rollouts there are.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from ..core.config.root import Config
from ..core.errors import ConfigError, LightningError
from ..core.statistics import SEED, bootstrap_mean, compare
from .api_client import ApiClient, ApiError
from .files import save_json
from .formats import print_json, table
from .run.command import programs, run_options
from .run.report import Bar, ProgressView, by_name, by_task, names_table
from .run.run import RolloutResult, RunOptions, require_success, run_tasks
from .run.runner import Runner, runner_for
from .run.tasks import Task, read_tasks
from .signals import run_until_signal

Json = dict[str, Any]
LIVE = "live"
PASSED = 1.0  # the reward of a rollout that has passed


@dataclass(slots=True)
class EvalRow:
    """A model's results so far. `model` is `live`, the number of a policy version, or another model's name."""

    model: str
    results: list[RolloutResult] = field(default_factory=list)
    complete: bool = False

    @property
    def version(self) -> int | None:
        return int(self.model) if self.model.isascii() and self.model.isdigit() else None

    @property
    def choice(self) -> dict[str, Any]:
        """Return the fields of `POST /rollouts` that choose this model."""
        if self.model == LIVE:
            return {}
        return {"model": self.model} if self.version is None else {"policy_version": self.version}


def parse_models(text: str) -> list[EvalRow]:
    """Parse names such as `live,base,5,gpt-4o-mini`. Raises ConfigError if one is empty or repeated."""
    names = ["0" if name.strip() == "base" else name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"--models: expected names separated by commas, each once; got {text!r}")
    return [EvalRow(name) for name in names]


def eval_command(
    config: Config,
    command: Sequence[str],
    *,
    tasks: Path,
    models: str,
    preload: Sequence[str],
    samples: int,
    concurrency: int,
    promote: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the command. However it ends, show the results so far and save them to `out`, if it is given.

    Raise LightningError if the command fails, or if every program failed.
    """
    rows, read = parse_models(models), read_tasks(tasks)
    if out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):  # before hours of work are lost
        raise ConfigError(f"--out: cannot write {out}: it is a directory, or its folder is missing or read-only")
    if why_not := config.not_absolute([name for name, weight in config.trainer.training_weights.items() if weight]):
        raise ConfigError(why_not)
    view = ProgressView(Console(stderr=True))
    runner = runner_for(config, command, preload, view.say)
    options = run_options(config, samples, concurrency, "eval", None)

    async def work() -> None:
        api = ApiClient.of(config, patience_s=60)
        async with programs(api, runner, view):
            await evaluate(api, read, runner, options, rows, view, promote=promote)

    try:
        run_until_signal(work())
    finally:
        if any(row.results for row in rows):
            about = {"created_at": time.time(), "tasks": str(tasks), "samples": samples, "command": command}
            numbers = report(rows, about)
            if out is not None:
                save_json(numbers, out)
            if as_json:
                print_json(numbers)
            else:
                print_tables(numbers)
                more = f"; all numbers: {out}" if out is not None else ""
                print(f"passed: reward >= {PASSED:g}; a rollout without a reward counts as 0{more}")
    require_success([result for row in rows for result in row.results])


async def evaluate(
    api: ApiClient,
    tasks: Sequence[Task],
    runner: Runner,
    options: RunOptions,
    rows: Sequence[EvalRow],
    view: ProgressView,
    *,
    promote: bool,
) -> None:
    """Run all tasks with one model after another: on a CPU, vLLM confuses base model and adapters within a batch.

    Raises LightningError before anything starts if a model cannot answer, and as soon as a wrong model has answered.
    The results are in `rows` even then. With `promote`, versions that are not served side by side (policy.publish:
    merged) are made live one after another, and at the end the version that was live before.
    """
    policy = await api.policy()
    alias, before = policy["alias"], int(policy["live_version"])
    live, promote = before, promote and policy["publish"] == "merged"
    await _check(api, rows, promote=promote)
    try:
        for row in rows:
            needed = before if row.model == LIVE else row.version
            if promote and needed is not None and needed != live:
                view.say(f"making policy version {needed} live; version {before} will be live again at the end")
                live = needed  # even if the next line is cut short, it may be live by then
                await api.request("POST", "/policy/promote", {"version": needed})
            bar = view.bar(row.model, len(tasks) * options.group_size)

            def take(result: RolloutResult, row: EvalRow = row, bar: Bar = bar) -> None:
                row.results.append(_answered_by(row, result, alias))
                bar.add(result)

            await run_tasks(api, tasks, runner, replace(options, choice=row.choice), take)
            row.complete = True
    finally:
        if live != before:
            await asyncio.shield(_restore(api, before, view))


async def _check(api: ApiClient, rows: Sequence[EvalRow], *, promote: bool) -> None:
    """Raise LightningError if a model cannot answer, or if a version that is to be made live cannot be."""
    versions = (await api.request("GET", "/policy/versions"))["data"] if promote else []
    for row in rows:
        if not promote or row.version is None:
            await api.open_rollouts("eval", "eval", 0, **row.choice)
            continue
        version = next((one for one in versions if one["version"] == row.version), None)
        if version is None:
            raise LightningError(f"no policy version {row.version}")
        if row.version and (version["path"] is None or version["status"] not in ("ready", "live")):
            files = "no files" if version["path"] is None else f"status {version['status']}"
            raise LightningError(f"policy version {row.version} cannot be made live: {files}")


async def _restore(api: ApiClient, version: int, view: ProgressView) -> None:
    try:
        await api.request("POST", "/policy/promote", {"version": version})
        view.say(f"policy version {version} is live again")
    except ApiError as error:
        again = f"lightning-proxy policy promote {version}"
        raise LightningError(
            f"policy version {version} could not be made live again: {error.message}; try `{again}`"
        ) from None


def _answered_by(row: EvalRow, result: RolloutResult, alias: str) -> RolloutResult:
    """Return the result with only the answers to the alias, if there are any: other calls are of untrained agents.

    For a row other than `live`, raise LightningError if another model answered, since the agent asked for that one by
    name or the live version changed.
    """
    versions = result.answers.get(alias)
    if row.model != LIVE and result.answers:
        wrong = f"rollout {result.rollout_id} should have been answered by "
        if row.version is None and versions is None:
            names = ", ".join(sorted(map(str, result.answers)))
            raise LightningError(f"{wrong}{row.model}, but its agent never asked for {alias!r}, only for {names}")
        others = sorted(set(versions or result.policy_versions) - {row.version}, key=str)
        if row.version is not None and others:
            by = ", ".join("another model" if version is None else f"version {version}" for version in others)
            raise LightningError(
                f"{wrong}policy version {row.version}, but was answered by {by}. The agent must ask for the policy's "
                "alias, and if policy.publish is merged, no trainer may publish during an evaluation"
            )
    return result if not versions else replace(result, answers={alias: versions})


def report(rows: Sequence[EvalRow], about: Json) -> Json:
    """Return the rows that have results as plain data, each compared with the first, together with `about`."""
    found = [_summary(row) for row in rows if row.results]
    for summary in found[1:]:
        summary["versus"] = _versus(summary, found[0])
    return about | {"pass_at": PASSED, "seed": SEED, "complete": all(row.complete for row in rows), "rows": found}


def _summary(row: EvalRow) -> Json:
    tasks: dict[str, Json] = {
        name: {
            "mean_reward": fmean(result.reward or 0.0 for result in results),
            "passed": sum(result.reward is not None and result.reward >= PASSED for result in results),
            "rewards": [result.reward for result in results],
            "rollouts": [result.rollout_id for result in results],
            "failures": [result.reason for result in results if result.reason],
        }
        for name, results in by_task(row.results).items()
    }
    means = [task["mean_reward"] for task in tasks.values()]
    versions = {version for result in row.results for version in result.policy_versions}
    chances = {  # of each k that every task has enough rollouts for
        k: [pass_at_k(len(task["rewards"]), task["passed"], k) for task in tasks.values()]
        for k in ks(min(len(task["rewards"]) for task in tasks.values()))
    }
    return {
        "model": row.model,
        "complete": row.complete,
        "policy_versions": sorted(versions, key=lambda version: -1 if version is None else version),
        "tasks": len(tasks),
        "rollouts": len(row.results),
        "failed": sum(result.failed for result in row.results),
        "without_reward": sum(result.reward is None for result in row.results),
        "tokens": sum(result.tokens for result in row.results),
        "mean_reward": fmean(means),
        "interval": asdict(bootstrap_mean(means)),
        "pass_at_k": {
            str(k): {"value": fmean(of_k), "interval": asdict(bootstrap_mean(of_k))} for k, of_k in chances.items()
        },
        "by_name": by_name(row.results),
        "by_task": tasks,
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the chance that at least one of k <= n rollouts passes, if c of n did.

    Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def ks(samples: int) -> list[int]:
    """Return the values of k to show in pass@k: 1, 2, 4, … and the number of samples itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def _versus(row: Json, first: Json) -> Json | None:
    """Return the comparison with the first row on the tasks of both; None if they have no task in common."""
    both = [task for task in row["by_task"] if task in first["by_task"]]
    if not both:
        return None
    ours, theirs = ([side["by_task"][task]["mean_reward"] for task in both] for side in (row, first))
    return {"model": first["model"], **asdict(compare(ours, theirs))}


def print_tables(found: Json) -> None:
    """Print the results by model, rewards by name if there are any, and comparisons with the first model.

    Of pass@k, only the smallest and the largest k are shown.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=240, no_color=True)
    rows = found["rows"]
    first, *others = rows
    of_rows = {int(k) for row in rows for k in row["pass_at_k"]}
    ends = sorted({min(of_rows), max(of_rows)})
    results = table("model", right=("reward", "95 %", *(f"pass@{k}" for k in ends), "failed", "no reward"))
    for row in rows:
        passed = (_share(row["pass_at_k"].get(str(k)), with_interval=k == 1) for k in ends)
        counts = (str(row[name]) for name in ("failed", "without_reward"))
        results.add_row(_label(row), f"{row['mean_reward']:.3f}", _between(row["interval"]), *passed, *counts)
    console.print(results)
    if (names := names_table({_label(row): row["by_name"] for row in rows})) is not None:
        console.print("", names, sep="\n")
    compared = [row for row in others if row["versus"] is not None]
    versus = table("model", right=(f"above {first['model']}", "95 %", "p", "tasks"))
    for row in compared:
        of_row = row["versus"]
        numbers = (f"{of_row['difference']:+.3f}", _between(of_row["interval"]), f"{of_row['p']:.4f}")
        versus.add_row(row["model"], *numbers, str(of_row["tasks"]))
    if others:
        console.print("", versus, sep="\n")


def _label(row: Json) -> str:
    """Return the model's name, followed for `live` by the versions that answered, and by `stopped` if incomplete."""
    ours = [version for version in row["policy_versions"] if version is not None]
    which = f" ({ours[0]})" if len(ours) == 1 else f" ({ours[0]} to {ours[-1]})" if ours else ""
    return row["model"] + (which if row["model"] == LIVE else "") + ("" if row["complete"] else ", stopped")


def _between(interval: Json) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"


def _share(chance: Json | None, *, with_interval: bool) -> str:
    """Return a share in percent, with its interval if that is asked for; `-` if there is none."""
    if chance is None:
        return "-"
    low, high = (100 * chance["interval"][end] for end in ("low", "high"))
    return f"{100 * chance['value']:.0f} %" + f" ({low:.0f} to {high:.0f})" * with_interval
