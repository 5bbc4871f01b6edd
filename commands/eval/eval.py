"""The `eval` command: held-out tasks with one model after another, a table at the end, and a file with all numbers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ..api_client import ApiClient, ApiError
from ..files import save_json
from ..formats import print_json
from ..run.command import programs, run_options
from ..run.report import Bar, ProgressView
from ..run.run import RolloutResult, RunOptions, require_success, run_tasks
from ..run.runner import Runner, runner_for
from ..run.tasks import Task, read_tasks
from ..signals import run_until_signal
from .report import LIVE, PASSED, EvalRow, print_tables, report


def parse_models(text: str) -> list[EvalRow]:
    """Parse `live,0,5,gpt-4o-mini`; `base` is version 0. ConfigError for an empty or repeated name."""
    names = ["0" if name.strip() == "base" else name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"--models: names separated by commas, each once, got {text!r}")
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
    """Run the command. What is known is shown and saved, however it ends.

    Raise LightningError if it fails, or if every program failed.
    """
    rows, read = parse_models(models), read_tasks(tasks)
    if out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):  # before hours of work are lost
        raise ConfigError(f"--out: cannot write {out}")
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
    """Run all tasks, one row after another: vLLM on a CPU mixes up base model and adapters that share a batch.

    Raises before anything starts if a model cannot answer, and at once if another model answered. However it ends, the
    results are in `rows`, and the version that was live before is live again. `promote`: make versions live one after
    the other if they are not served side by side.
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
    """Check that each model can answer: open 0 rollouts with it, or look up the version to promote."""
    versions = (await api.request("GET", "/policy/versions"))["data"] if promote else []
    for row in rows:
        if not promote or row.version is None:
            await api.open_rollouts("eval", "eval", 0, **row.choice)
            continue
        version = next((one for one in versions if one["version"] == row.version), None)
        if version is None:
            raise LightningError(f"no policy version {row.version}")
        if row.version and (version["path"] is None or version["status"] not in ("ready", "live")):
            raise LightningError(f"policy version {row.version} is {version['status']} and has no files to serve")


async def _restore(api: ApiClient, version: int, view: ProgressView) -> None:
    try:
        await api.request("POST", "/policy/promote", {"version": version})
        view.say(f"policy version {version} is live again")
    except ApiError as error:
        again = f"lightning-proxy policy promote {version}"
        raise LightningError(f"version {version} is not live again: {error.message}; try `{again}`") from None


def _answered_by(row: EvalRow, result: RolloutResult, alias: str) -> RolloutResult:
    """Return the result with what answered for the alias alone: other calls belong to agents that are not trained.

    Raise LightningError if another model answered: the agent asked for it by name, or the live version changed.
    """
    versions = result.answers.get(alias)
    if row.model != LIVE and result.answers:
        wrong = f"rollout {result.rollout_id} should be answered by "
        if row.version is None and versions is None:
            names = ", ".join(sorted(map(str, result.answers)))
            raise LightningError(f"{wrong}{row.model}, but its agent never asked for {alias!r}, only for {names}")
        others = sorted(set(versions or result.policy_versions) - {row.version}, key=str)
        if row.version is not None and others:
            by = ", ".join("another model" if version is None else f"version {version}" for version in others)
            raise LightningError(
                f"{wrong}policy version {row.version}, but was answered by {by}. The agent must ask for the policy's "
                "alias, and with policy.publish: merged no trainer may publish during an evaluation"
            )
    return result if not versions else replace(result, answers={alias: versions})
