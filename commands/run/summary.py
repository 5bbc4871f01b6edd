"""The summary that `run` prints: totals, and exact numbers by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.table import Table

from .run import RolloutResult
from .runner import CANNOT_START


@dataclass(frozen=True, slots=True)
class Totals:
    """`mean_reward` and `solved` are over the rollouts with a reward. `solved` is the share with reward >= 1.

    `without_call`: those whose program ran, but made no call through the proxy. `restarts`: how often a task was begun
    anew because the machine under its program went away.
    """

    rollouts: int
    failed: int
    without_reward: int
    mean_reward: float | None
    solved: float | None
    without_call: int = 0
    restarts: int = 0


def totals(results: Sequence[RolloutResult]) -> Totals:
    """Return the totals of all results, or of one task's."""
    rewards = [result.reward for result in results if result.reward is not None]
    return Totals(
        rollouts=len(results),
        failed=sum(result.failed for result in results),
        without_reward=len(results) - len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        solved=sum(reward >= 1 for reward in rewards) / len(rewards) if rewards else None,
        without_call=sum(result.calls == 0 and result.exit_code != CANNOT_START for result in results),
        restarts=sum(result.restarts for result in results),
    )


def summarize(results: Sequence[RolloutResult]) -> dict[str, object]:
    """Return the summary as plain data: totals, and for each task its totals, rewards and failures."""
    tasks = {
        name: {
            **asdict(totals(group)),
            "rewards": [result.reward for result in group],
            "failures": [result.reason for result in group if result.reason],
        }
        for name, group in by_task(results).items()
    }
    return {**asdict(totals(results)), "by_name": by_name(results), "tasks": tasks}


def by_name(results: Sequence[RolloutResult]) -> dict[str, dict[str, float]]:
    """Return the mean and the number of the rewards of each further name, such as that of a game's seat."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, reward in result.named.items():
            found.setdefault(name, []).append(reward)
    return {name: {"mean": fmean(rewards), "rollouts": len(rewards)} for name, rewards in sorted(found.items())}


def names_table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table | None:
    """Return a table of what `by_name` found for each model; None without any further name."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("model", "reward by name", "mean", "rollouts"):
        table.add_column(head, justify="right" if head in ("mean", "rollouts") else "left", no_wrap=True)
    for model, names in found.items():
        for name, one in names.items():
            table.add_row(model, name, f"{one['mean']:.3f}", f"{one['rollouts']:.0f}")
    return table if table.row_count else None


def by_task(results: Sequence[RolloutResult]) -> dict[str, list[RolloutResult]]:
    """Return the results of each task, tasks in the order of their ids."""
    groups: dict[str, list[RolloutResult]] = {}
    for result in results:
        groups.setdefault(result.task_id, []).append(result)
    return dict(sorted(groups.items()))


def sentence(results: Sequence[RolloutResult]) -> str:
    """Return the summary in one line for a person."""
    total = totals(results)
    mean = "no reward" if total.mean_reward is None else f"mean reward {total.mean_reward:.3f}"
    line = f"{total.rollouts} rollouts, {mean}, {total.failed} failed, {total.without_reward} without a reward so far"
    reasons = [result.reason for result in results if result.reason]
    return f"{line}\nfirst failure: {reasons[0]}" if reasons else line


def no_calls(results: Sequence[RolloutResult]) -> str | None:
    """Return a line about rollouts without a call, and what to check. None if all made one."""
    silent = totals(results).without_call
    if not silent:
        return None
    return f"{silent} of {len(results)} rollouts made no call: does your agent read OPENAI_BASE_URL?"


def begun_anew(results: Sequence[RolloutResult]) -> str | None:
    """Return how many runs were begun anew because their machine went away, as a line. None if none was."""
    restarts = totals(results).restarts
    return f"{restarts} runs were begun anew, in other rollouts: their machine went away" if restarts else None
