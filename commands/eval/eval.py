"""Runs held-out tasks with one model after another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.errors import ConfigError, LightningError
from ..api_client import ApiClient, ApiError
from ..run.limits import Observer
from ..run.report import Bar, ProgressView
from ..run.run import RolloutResult, RunOptions, run_tasks
from ..run.runner import Runner
from ..run.tasks import Task

LIVE = "live"


@dataclass(slots=True)
class EvalRow:
    """The results so far of a model: `live`, a policy version, or any model by its name."""

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
    """Parse `live,0,5,gpt-4o-mini`; `base` is version 0. ConfigError for an empty or repeated name."""
    names = ["0" if name.strip() == "base" else name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"--models: names separated by commas, each once, got {text!r}")
    return [EvalRow(name) for name in names]


async def evaluate(
    api: ApiClient,
    tasks: Sequence[Task],
    runner: Runner,
    options: RunOptions,
    rows: Sequence[EvalRow],
    view: ProgressView,
    gate: Observer,
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
                _check_answered_by(row, result, alias)
                if versions := result.answers.get(alias):  # calls for other models are not evaluated
                    result = replace(result, answers={alias: versions})
                row.results.append(result)
                bar.add(result)

            await run_tasks(api, tasks, runner, replace(options, choice=row.choice), take, gate)
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


def _check_answered_by(row: EvalRow, result: RolloutResult, alias: str) -> None:
    """Raise if another model answered: the agent asked for it by name, or the live version changed.

    Calls for other models beside those for the alias are fine: they belong to agents that are not trained.
    """
    if row.model == LIVE or not result.answers:
        return
    wrong = f"rollout {result.rollout_id} should be answered by "
    if row.version is None:
        if alias not in result.answers:
            names = ", ".join(sorted(map(str, result.answers)))
            raise LightningError(f"{wrong}{row.model}, but its agent never asked for {alias!r}, only for {names}")
        return
    others = sorted(set(result.answers.get(alias) or result.policy_versions) - {row.version}, key=str)
    if others:
        raise LightningError(
            f"{wrong}policy version {row.version}, but was answered by "
            f"{', '.join('another model' if v is None else f'version {v}' for v in others)}. The agent must ask for "
            "the policy's alias, and with policy.publish: merged no trainer may publish during an evaluation"
        )
