"""What the runs of an example found: a table, the curve as a picture, everything as JSON.

`python examples/learned.py RESULTS.json` prints the table for a document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lightning_proxy.core.statistics import compare

Json = dict[str, Any]
STAGES = {"base": "base model", "sft": "imitation", "rl": "RL"}


def show(results: Sequence[Json]) -> None:
    """Held-out mean rewards, a line a seed."""
    table = Table(title=f"{results[0]['example']}: mean reward of held-out tasks after each stage (95 % interval)")
    head, *lines = _lines(results)
    for column in head:
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(*(cell.replace(" (", "\n").rstrip(")") for cell in line))  # of 80 columns
    Console().print(table)


def markdown(results: Sequence[Json]) -> str:
    """The same as `show`, for a document."""
    head, *lines = _lines(results)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def _lines(results: Sequence[Json]) -> list[list[str]]:
    """A head, and a line for each seed."""
    stages = [name for name in STAGES if name in results[0]["held_out"]]
    gains = [_gain(one["held_out"], stages[-2]) for one in results] if len(stages) > 1 else []
    shown = bool(gains) and all(gains)
    found = [["seed", *(STAGES[name] for name in stages), *["what RL adds"][:shown], "steps of RL", "minutes"]]
    for one, gain in zip(results, gains or [""] * len(results), strict=True):
        rewards = [_with_interval(one["held_out"][name]) for name in stages]
        minutes = f"{sum(one['minutes'].values()):.1f}"
        found.append([str(one["seed"]), *rewards, *[gain][:shown], str(len(one["steps"])), minutes])
    return found


def _gain(held_out: Json, before: str) -> str:
    """What the tasks' rewards after RL are above those before, paired; empty where they were not kept."""
    earlier, later = (held_out[name].get("by_task", {}) for name in (before, "rl"))
    if not earlier or earlier.keys() != later.keys():
        return ""
    found = compare([later[task] for task in earlier], list(earlier.values()), seed=0)
    return f"{found.difference:+.2f} ({found.interval.low:+.2f} to {found.interval.high:+.2f})"


def save(results: Sequence[Json], directory: Path) -> None:
    """Write results.json and reward.png."""
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for colour, one in enumerate(results):
        _draw(axes, one, f"C{colour}")
    axes.set(xlabel="step of RL", ylabel="mean reward", ylim=(-0.02, 1.02), title=results[0]["example"])
    axes.grid(alpha=0.3)
    if any(one["steps"] for one in results):
        axes.legend(loc="lower right", fontsize="small")
    figure.savefig(directory / "reward.png", dpi=100)


def _draw(axes: Any, one: Json, colour: str) -> None:
    """Line: the training rollouts of each step. Dots: held-out tasks, before and after RL; ring: the base model."""
    curve = [(step["step"], step["reward_mean"]) for step in one["steps"] if step["reward_mean"] is not None]
    axes.plot(*zip(*curve, strict=True), color=colour, label=f"seed {one['seed']}") if curve else None
    held_out, last = one["held_out"], len(one["steps"]) + 1
    for name, x in (("sft", 0), ("rl", last)):
        if name in held_out:
            axes.plot(x, held_out[name]["mean_reward"], "o", color=colour)
    axes.plot(0, held_out["base"]["mean_reward"], "o", color=colour, fillstyle="none")


def _with_interval(row: Json) -> str:
    interval = row["interval"]
    return f"{row['mean_reward']:.2f} ({interval['low']:.2f}-{interval['high']:.2f})"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())), end="")
