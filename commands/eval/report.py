"""What `eval` found: plain data for the file, and a table for a person. Pure, apart from `save`.

A rollout without a reward, because it failed or because none was posted, counts as reward 0 and as not passed: an agent
that gave no answer has not solved its task. How many these are is shown beside.
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

from ...proxy.errors import ConfigError, LightningError
from ..run.run import RolloutResult
from .eval import LIVE, Row
from .stats import bootstrap_mean, compare, ks, pass_at_k

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scoring:
    """`pass_at`: the reward from which on a rollout has passed; `seed`: of the bootstrap and the permutations."""

    pass_at: float = 1.0
    seed: int = 0


def report(rows: Sequence[Row], scoring: Scoring, about: Json) -> Json:
    """All rows that have begun, each compared with the first; `about` says what was run."""
    begun = [row for row in rows if row.results]
    by_task = [_by_task(row.results) for row in begun]
    found = [_summary(row, tasks, scoring) for row, tasks in zip(begun, by_task, strict=True)]
    for summary, tasks in zip(found[1:], by_task[1:], strict=True):
        summary["versus"] = _versus(tasks, by_task[0], begun[0].model.name, scoring)
    return about | {"pass_at": scoring.pass_at, "seed": scoring.seed, "complete": _complete(rows), "rows": found}


def results_table(found: Json) -> Table:
    """One line a model. Of pass@k the first and the last; the others are in the file."""
    samples = sorted({int(k) for row in found["rows"] for k in row["pass_at_k"]})
    samples = sorted({*samples[:1], *samples[-1:]})
    shown = _table("model", "reward", "95 %", *(f"pass@{k}" for k in samples), "failed", "no reward")
    for row in found["rows"]:
        passed = [_share(row["pass_at_k"].get(str(k))) for k in samples]
        counts = [str(row[name]) for name in ("failed", "without_reward")]
        shown.add_row(_label(row), f"{row['mean_reward']:.3f}", _between(row["interval"]), *passed, *counts)
    return shown


def comparison_table(found: Json) -> Table:
    """How far each model is above the first, on the tasks that both have."""
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
    """To standard output; plain wherever that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240, no_color=True)
    console.print(results_table(found))
    if len(found["rows"]) > 1:
        console.print()
        console.print(comparison_table(found))


def _table(*heads: str) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        shown.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    return shown


def save(found: Json, path: Path) -> None:
    """The file appears whole or stays what it was. Raises LightningError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise LightningError(f"cannot write {path}: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """ConfigError if `save` could not: known before hours of work, not after."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out: cannot write {path}")


def _by_task(results: Sequence[RolloutResult]) -> dict[str, list[RolloutResult]]:
    found: dict[str, list[RolloutResult]] = {}
    for result in results:
        found.setdefault(result.task_id, []).append(result)
    return dict(sorted(found.items()))


def _summary(row: Row, tasks: dict[str, list[RolloutResult]], scoring: Scoring) -> Json:
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
        "by_task": {name: _task(results, scoring) for name, results in tasks.items()},
    }


def _pass_at_k(tasks: dict[str, list[RolloutResult]], scoring: Scoring) -> Json:
    """For each k that every task has so many rollouts for: the mean over tasks and its interval."""
    found = {}
    for k in ks(min(map(len, tasks.values()))):
        chances = [pass_at_k(len(results), _passed(results, scoring), k) for results in tasks.values()]
        interval = asdict(bootstrap_mean(chances, scoring.seed))
        found[str(k)] = {"value": sum(chances) / len(chances), "interval": interval}
    return found


def _versus(
    tasks: dict[str, list[RolloutResult]], first: dict[str, list[RolloutResult]], name: str, scoring: Scoring
) -> Json | None:
    """On the tasks that both have; None without any."""
    both = [task for task in tasks if task in first]
    if not both:
        return None
    means, others = [_mean(tasks[task]) for task in both], [_mean(first[task]) for task in both]
    return {"model": name, **asdict(compare(means, others, scoring.seed))}


def _task(results: Sequence[RolloutResult], scoring: Scoring) -> Json:
    return {
        "mean_reward": _mean(results),
        "passed": _passed(results, scoring),
        "rewards": [result.reward for result in results],
        "rollouts": [result.rollout_id for result in results],
        "failures": [result.reason for result in results if result.reason],
    }


def _mean(results: Sequence[RolloutResult]) -> float:
    return sum(result.reward or 0.0 for result in results) / len(results)


def _passed(results: Sequence[RolloutResult], scoring: Scoring) -> int:
    return sum(result.reward is not None and result.reward >= scoring.pass_at for result in results)


def _complete(rows: Sequence[Row]) -> bool:
    return all(row.complete for row in rows)


def _label(row: Json) -> str:
    """The model; of `live`, which versions that were."""
    ours = [version for version in row["policy_versions"] if version is not None]
    which = f" ({ours[0]})" if len(ours) == 1 else f" ({ours[0]} to {ours[-1]})" if ours else ""
    return row["model"] + (which if row["model"] == LIVE else "") + ("" if row["complete"] else ", stopped")


def _between(interval: Json) -> str:
    return f"{interval['low']:.3f} to {interval['high']:.3f}"


def _share(found: Json | None) -> str:
    return "-" if found is None else f"{100 * found['value']:.1f} %"
