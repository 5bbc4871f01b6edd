"""The results of `eval`: plain data for the file, and tables for a person.

A rollout without a reward counts as reward 0 and as not passed, since an agent that gave no answer has not solved its
task. The tables also show how many these are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Console

from ...core.statistics import SEED, bootstrap_mean, compare
from ..formats import table
from ..run.report import by_name, by_task, names_table
from ..run.run import RolloutResult

Json = dict[str, Any]
LIVE = "live"
PASSED = 1.0  # the reward of a rollout that has passed


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


def report(rows: Sequence[EvalRow], about: Json) -> Json:
    """Return plain data of all rows that have begun, each compared with the first. `about` describes the run."""
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
    """Return the unbiased chance that at least one of k <= n rollouts passes, if c of n did.

    Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def ks(samples: int) -> list[int]:
    """Return the k of pass@k to show: 1, 2, 4, … and the number of samples itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def _versus(row: Json, first: Json) -> Json | None:
    """The comparison with the first row, on the tasks that both have; None without any."""
    both = [task for task in row["by_task"] if task in first["by_task"]]
    if not both:
        return None
    ours, theirs = ([side["by_task"][task]["mean_reward"] for task in both] for side in (row, first))
    return {"model": first["model"], **asdict(compare(ours, theirs))}


def print_tables(found: Json) -> None:
    """Print a table of the rows, one of their rewards by name, and one of the comparisons with the first row.

    Of pass@k there are the first and the last; the file has all of them.
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
    """The model's name; for `live` also the versions that answered."""
    ours = [version for version in row["policy_versions"] if version is not None]
    which = f" ({ours[0]})" if len(ours) == 1 else f" ({ours[0]} to {ours[-1]})" if ours else ""
    return row["model"] + (which if row["model"] == LIVE else "") + ("" if row["complete"] else ", stopped")


def _between(interval: Json) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"


def _share(chance: Json | None, *, with_interval: bool) -> str:
    """A share in percent; of more than one k, an interval would leave no room at 80 columns."""
    if chance is None:
        return "-"
    low, high = (100 * chance["interval"][end] for end in ("low", "high"))
    return f"{100 * chance['value']:.0f} %" + f" ({low:.0f} to {high:.0f})" * with_interval
