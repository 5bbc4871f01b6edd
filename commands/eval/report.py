"""The results of `eval`: plain data for the file, and tables for a person.

A rollout without a reward counts as reward 0 and as not passed, since an agent that gave no answer has not solved its
task. The tables also show how many these are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...core.errors import ConfigError, LightningError
from ...core.statistics import bootstrap_mean
from ..run.report import by_name, by_task, names_table
from ..run.run import RolloutResult
from .eval import LIVE, EvalRow
from .stats import compare, comparison_line, ks, pass_at_k, same_version, weigh

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scoring:
    """A rollout has passed with a reward of at least `pass_at`. `seed` is for the bootstrap and the permutations."""

    pass_at: float = 1.0
    seed: int = 0


def report(rows: Sequence[EvalRow], scoring: Scoring, about: Json) -> Json:
    """Return plain data of all rows that have begun, each compared with the first. `about` describes the run."""
    begun = [row for row in rows if row.results]
    tasks = [by_task(row.results) for row in begun]
    summaries = [_summary(row, results, scoring) for row, results in zip(begun, tasks, strict=True)]
    for summary, results in zip(summaries[1:], tasks[1:], strict=True):
        versus = _versus(results, tasks[0], begun[0].model.name, scoring)
        summary["versus"] = versus and versus | {"same_version": same_version(summary, summaries[0])}
    complete = all(row.complete for row in rows)
    return about | {"pass_at": scoring.pass_at, "seed": scoring.seed, "complete": complete, "rows": summaries}


def results_table(found: Json) -> Table:
    """Return a table of one line per model, with the first and the last pass@k; the file has all of them."""
    samples = sorted({int(k) for row in found["rows"] for k in row["pass_at_k"]})
    samples = sorted({*samples[:1], *samples[-1:]})
    shown = _table("model", "reward", "95 %", *(f"pass@{k}" for k in samples), "failed", "no reward")
    for row in found["rows"]:
        passed = [_share(row["pass_at_k"].get(str(k)), with_interval=k == 1) for k in samples]
        counts = [str(row[name]) for name in ("failed", "without_reward")]
        shown.add_row(_label(row), f"{row['mean_reward']:.3f}", _between(row["interval"]), *passed, *counts)
    return shown


def comparison_table(found: Json) -> Table:
    """Return a table of how far each model is above the first, on the tasks that both have."""
    first, *others = found["rows"]
    shown = _table("model", f"above {first['model']}", "95 %", "p", "tasks")
    for row in others:
        if (versus := row["versus"]) is not None:
            between = _between(versus["interval"])
            shown.add_row(
                row["model"], f"{versus['difference']:+.3f}", between, f"{versus['p']:.4f}", str(versus["tasks"])
            )
    return shown


def print_tables(found: Json) -> None:
    """Print both tables and a line for each comparison, without colours if standard output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240, no_color=True)
    console.print(results_table(found))
    if (names := names_table({_label(row): row["by_name"] for row in found["rows"]})) is not None:
        console.print("", names, sep="\n")
    if len(found["rows"]) > 1:
        console.print()
        console.print(comparison_table(found))
        first, *others = found["rows"]
        for row in others:
            if row["versus"] is not None:
                print(comparison_line(row, first["model"]))


def _table(*heads: str) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        shown.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    return shown


def save(found: Json, path: Path) -> None:
    """Write the file atomically. Raises LightningError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(found, indent=1) + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise LightningError(f"cannot write {path}: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Raise ConfigError if `save` could not write here, before hours of work are lost."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out: cannot write {path}")


def _summary(row: EvalRow, tasks: dict[str, list[RolloutResult]], scoring: Scoring) -> Json:
    means = [_mean(results) for results in tasks.values()]
    versions = dict.fromkeys(version for result in row.results for version in result.policy_versions)
    return {
        "model": row.model.name,
        "complete": row.complete,
        "policy_versions": sorted(versions, key=lambda v: -1 if v is None else v),
        "tasks": len(tasks),
        "rollouts": len(row.results),
        "failed": sum(result.failed for result in row.results),
        "without_reward": sum(result.reward is None for result in row.results),
        "tokens": sum(result.tokens for result in row.results),
        "mean_reward": sum(means) / len(means),
        "interval": asdict(bootstrap_mean(means, scoring.seed)),
        "pass_at_k": _pass_at_k(tasks, scoring),
        "by_name": by_name(row.results),
        "by_task": {name: _task(results, scoring) for name, results in tasks.items()},
    }


def _pass_at_k(tasks: dict[str, list[RolloutResult]], scoring: Scoring) -> Json:
    """The mean over tasks and its interval, for each k that every task has enough rollouts for."""
    found = {}
    for k in ks(min(map(len, tasks.values()))):
        chances = [pass_at_k(len(results), _passed(results, scoring), k) for results in tasks.values()]
        interval = asdict(bootstrap_mean(chances, scoring.seed))
        found[str(k)] = {"value": sum(chances) / len(chances), "interval": interval}
    return found


def _versus(
    tasks: dict[str, list[RolloutResult]], first: dict[str, list[RolloutResult]], name: str, scoring: Scoring
) -> Json | None:
    """The comparison on the tasks that both have; None without any."""
    both = [task for task in tasks if task in first]
    if not both:
        return None
    means, others = [_mean(tasks[task]) for task in both], [_mean(first[task]) for task in both]
    evidence = weigh({task: _rewards(tasks[task]) for task in both}, {task: _rewards(first[task]) for task in both})
    return {"model": name, **asdict(compare(means, others, scoring.seed)), "evidence": evidence}


def _task(results: Sequence[RolloutResult], scoring: Scoring) -> Json:
    return {
        "mean_reward": _mean(results),
        "passed": _passed(results, scoring),
        "rewards": [result.reward for result in results],
        "rollouts": [result.rollout_id for result in results],
        "failures": [result.reason for result in results if result.reason],
    }


def _mean(results: Sequence[RolloutResult]) -> float:
    return sum(_rewards(results)) / len(results)


def _rewards(results: Sequence[RolloutResult]) -> list[float]:
    return [result.reward or 0.0 for result in results]


def _passed(results: Sequence[RolloutResult], scoring: Scoring) -> int:
    return sum(result.reward is not None and result.reward >= scoring.pass_at for result in results)


def _label(row: Json) -> str:
    """The model's name; for `live` also the versions that answered."""
    ours = [version for version in row["policy_versions"] if version is not None]
    which = f" ({ours[0]})" if len(ours) == 1 else f" ({ours[0]} to {ours[-1]})" if ours else ""
    return row["model"] + (which if row["model"] == LIVE else "") + ("" if row["complete"] else ", stopped")


def _between(interval: Json) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"


def _share(found: Json | None, *, with_interval: bool) -> str:
    """A share in percent; of more than one k, an interval would leave no room at 80 columns."""
    if found is None:
        return "-"
    low, high = (100 * found["interval"][end] for end in ("low", "high"))
    return f"{100 * found['value']:.0f} %" + f" ({low:.0f} to {high:.0f})" * with_interval
