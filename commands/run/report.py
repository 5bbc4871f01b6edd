"""Shows a run to people: progress as bars or lines, then a summary with totals and numbers by task."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ...core.guard import CANNOT_START
from ..formats import table
from .run import RolloutResult

LINE_EVERY_S = 10.0


class ProgressView:
    """`with ProgressView(console) as view:` shows the bars that `view.bar` makes, and `view.say` prints above them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        name = Column(max_width=22, no_wrap=True)  # all of it fits 80 columns
        columns = (
            TextColumn("{task.description}", markup=False, table_column=name), BarColumn(14), MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"), TextColumn("failed {task.fields[failed]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def bar(self, label: str, total: int) -> Bar:
        return Bar(self, label, total)

    def say(self, what: str, style: str = "dim") -> None:
        self.console.print(what, style=style, markup=False, highlight=False)

    def __enter__(self) -> ProgressView:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


class Bar:
    """Shows the progress of one piece of work: as a bar on a terminal, else as lines.

    `add` counts rollouts; `show` sets the counts directly.
    """

    def __init__(self, view: ProgressView, label: str, total: int) -> None:
        self._view, self.label, self._total = view, label, total
        self._bar = view.progress.add_task(label, total=total, reward="-", failed=0)
        self._started = self._printed_at = time.monotonic()
        self._done = self._failed = self._rewarded = 0
        self._reward = 0.0

    def add(self, result: RolloutResult) -> None:
        self._rewarded += result.reward is not None
        self._reward += result.reward or 0.0
        self._done, self._failed = self._done + 1, self._failed + result.failed
        self.show(self._done, self._reward / self._rewarded if self._rewarded else None, self._failed)

    def show(self, done: int, mean_reward: float | None, failed: int) -> None:
        reward, now = "-" if mean_reward is None else f"{mean_reward:.3f}", time.monotonic()
        self._view.progress.update(self._bar, completed=done, reward=reward, failed=failed)
        if not self._view.console.is_terminal and (done == self._total or now - self._printed_at > LINE_EVERY_S):
            self._printed_at, elapsed = now, timedelta(seconds=int(now - self._started))
            line = f"{self.label} {done}/{self._total}  reward {reward}  failed {failed}  {elapsed}"
            self._view.console.print(line, markup=False, highlight=False, soft_wrap=True)


def totals(results: Sequence[RolloutResult]) -> dict[str, Any]:
    """Return the totals that `run` reports for these results.

    `mean_reward` and `solved` (the share with a reward of at least 1) are over the rollouts with a reward.
    `without_call`: how many programs were started, but made no call through the proxy.
    """
    rewards = [result.reward for result in results if result.reward is not None]
    return {
        "rollouts": len(results),
        "failed": sum(result.failed for result in results),
        "without_reward": len(results) - len(rewards),
        "mean_reward": fmean(rewards) if rewards else None,
        "solved": fmean(reward >= 1 for reward in rewards) if rewards else None,
        "without_call": sum(result.calls == 0 and result.exit_code != CANNOT_START for result in results),
    }


def summarize(results: Sequence[RolloutResult]) -> dict[str, Any]:
    """Return the totals and the rewards by name, and for each task its totals, rewards and failures."""
    tasks = {
        name: {
            **totals(group),
            "rewards": [result.reward for result in group],
            "failures": [result.reason for result in group if result.reason],
        }
        for name, group in by_task(results).items()
    }
    return {**totals(results), "by_name": by_name(results), "tasks": tasks}


def by_name(results: Sequence[RolloutResult]) -> dict[str, dict[str, float]]:
    """Return the mean and the number of rewards for each additional name, such as a game's seat."""
    rewards: dict[str, list[float]] = {}
    for result in results:
        for name, reward in result.named.items():
            rewards.setdefault(name, []).append(reward)
    return {name: {"mean": fmean(given), "rollouts": len(given)} for name, given in sorted(rewards.items())}


def names_table(models: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table | None:
    """Return a table of `by_name` for each model; None if there are no additional names."""
    shown = table("model", "reward by name", right=("mean", "rollouts"))
    for model, names in models.items():
        for name, given in names.items():
            shown.add_row(model, name, f"{given['mean']:.3f}", f"{given['rollouts']:.0f}")
    return shown if shown.row_count else None


def by_task(results: Sequence[RolloutResult]) -> dict[str, list[RolloutResult]]:
    groups: dict[str, list[RolloutResult]] = {}
    for result in results:
        groups.setdefault(result.task_id, []).append(result)
    return dict(sorted(groups.items()))


def sentences(results: Sequence[RolloutResult]) -> tuple[str, list[str]]:
    """Return a summary for people, which includes the first failure, and a list of warnings."""
    total, warnings = totals(results), []
    mean = "no reward" if total["mean_reward"] is None else f"mean reward {total['mean_reward']:.3f}"
    counts = f"{total['failed']} failed, {total['without_reward']} without a reward so far"
    failure = next((f"\nfirst failure: {result.reason}" for result in results if result.reason), "")
    if n := total["without_call"]:
        warnings.append(f"{n} of {len(results)} rollouts made no call: does your agent read OPENAI_BASE_URL?")
    return f"{total['rollouts']} rollouts, {mean}, {counts}{failure}", warnings
