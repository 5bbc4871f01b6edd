"""The `eval` command: held-out tasks with one model after another, a table at the end, and a file with all numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError
from ..api_client import ApiClient, ApiError
from ..formats import print_json
from ..run.command import programs, run_options
from ..run.limits import Observer
from ..run.report import ProgressView
from ..run.run import RolloutResult, RunOptions, require_success, run_tasks
from ..run.runner import Runner, runner_for
from ..run.tasks import Task, read_tasks
from ..signals import run_until_signal
from .report import LIVE, EvalRow, check_writable, print_tables, report, save


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
    pass_at: float,
    out: Path | None,
    logs: Path | None,
    as_json: bool,
) -> None:
    """Run all tasks. What is known is shown and saved, however it ends.

    Raise what `evaluate` does, and LightningError at the end if every program failed.
    """
    rows, read = parse_models(models), read_tasks(tasks)
    if out is not None:
        check_writable(out)
    if why_not := config.not_absolute([name for name, weight in config.trainer.training_weights.items() if weight]):
        raise ConfigError(why_not)
    view = ProgressView(Console(stderr=True))
    runner = runner_for(config, command, preload, view.say)
    options = run_options(config, samples, concurrency, "eval", logs)
    try:
        run_until_signal(evaluate(config, read, runner, options, rows, view, promote=promote))
    finally:
        if any(row.results for row in rows):
            about = {"created_at": time.time(), "tasks": str(tasks), "samples": samples, "command": command}
            numbers = report(rows, pass_at, about)
            if out is not None:
                save(numbers, out)
            if as_json:
                print_json(numbers)
            else:
                print_tables(numbers)
                more = f"; all numbers: {out}" if out is not None else ""
                print(f"passed: reward >= {pass_at:g}; a rollout without a reward counts as 0{more}")
    require_success([result for row in rows for result in row.results])


async def evaluate(
    config: Config,
    tasks: Sequence[Task],
    runner: Runner,
    options: RunOptions,
    rows: Sequence[EvalRow],
    view: ProgressView,
    *observers: Observer,
    promote: bool,
) -> None:
    """Run all tasks, one model after another: vLLM on a CPU mixes up base model and adapters that share a batch.

    However it ends, results are in `rows`, and the version that was live before is live again. `promote`: make versions
    live one after the other if they are not served side by side. Raise LightningError before anything starts if a model
    cannot answer, and at once if another model answered.
    """
    api = ApiClient.of(config, patience_s=60)
    async with programs(api, runner, view), LivePolicy(api, view, may_promote=promote) as policy:
        for row in rows:
            await policy.check(row)
        for row in rows:
            await policy.serve(row)
            bar = view.bar(row.model, len(tasks) * options.group_size)

            def take(result: RolloutResult, row: EvalRow = row, add: Any = bar.add) -> None:
                row.results.append(answered_by(row, result, policy.alias))
                add(result)

            await run_tasks(api, tasks, runner, replace(options, choice=row.choice), take, *observers)
            row.complete = True


class LivePolicy:
    """Makes versions live one after the other where they are not served side by side, and the first again at the end.

    `alias`: the policy's.
    """

    def __init__(self, api: ApiClient, view: ProgressView, *, may_promote: bool) -> None:
        self._api, self._view, self._may_promote = api, view, may_promote
        self.alias = ""

    async def __aenter__(self) -> LivePolicy:
        policy = await self._api.policy()
        self.alias, self._before = policy["alias"], int(policy["live_version"])
        self._live = self._before
        self._may_promote &= policy["publish"] == "merged"
        return self

    async def check(self, row: EvalRow) -> None:
        """Raise LightningError if the model cannot answer: open 0 rollouts with it, or look up the version."""
        if not self._may_promote or row.version is None:
            await self._api.open_rollouts("eval", "eval", 0, **row.choice)
            return
        versions = (await self._api.request("GET", "/policy/versions"))["data"]
        version = next((one for one in versions if one["version"] == row.version), None)
        if version is None:
            raise LightningError(f"no policy version {row.version}")
        if row.version and (version["path"] is None or version["status"] not in ("ready", "live")):
            raise LightningError(f"policy version {row.version} is {version['status']} and has no files to serve")

    async def serve(self, row: EvalRow) -> None:
        """Make the row's version live, if it has to be."""
        needed = self._before if row.model == LIVE else row.version
        if self._may_promote and needed is not None and needed != self._live:
            self._view.say(f"making policy version {needed} live; version {self._before} will be live again at the end")
            self._live = needed  # even if the next line is cut short, it may be live by then
            await self._api.request("POST", "/policy/promote", {"version": needed})

    async def __aexit__(self, *_: object) -> None:
        if self._live != self._before:
            await asyncio.shield(self._restore())

    async def _restore(self) -> None:
        version = self._before
        try:
            await self._api.request("POST", "/policy/promote", {"version": version})
            self._view.say(f"policy version {version} is live again")
        except ApiError as error:
            again = f"lightning-proxy policy promote {version}"
            raise LightningError(f"version {version} is not live again: {error.message}; try `{again}`") from None


def answered_by(row: EvalRow, result: RolloutResult, alias: str) -> RolloutResult:
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
