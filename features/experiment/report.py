"""What the lessons of an experiment found: a table with intervals over seeds and tasks, and the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ...core.errors import LightningError
from ...core.statistics import RESAMPLES, Interval
from .plan import Json

HEAD = ("variant", "seeds", "before", "after", "95 %", "gain", "95 %", "above {}", "95 %", "minutes", "tokens")


def show(results: Sequence[Json]) -> None:
    """Print a line for each variant: mean reward of the held-out tasks, and 95 % intervals over seeds and tasks."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    heads, *rows = lines(results)
    for head in heads:
        table.add_column(head, justify="left" if head == "variant" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console = console if console.is_terminal else Console(width=240, no_color=True)
    console.print(table)
    if alone := [name for name, seeds, *_ in rows if seeds == "1"]:
        console.print(
            f"one seed ({', '.join(alone)}): these intervals are over tasks only", markup=False, highlight=False
        )


def lines(results: Sequence[Json]) -> list[list[str]]:
    """Return the table's head, and a line for each variant. The last comparison is with the first variant, paired."""
    variants: dict[str, dict[int, Json]] = {}
    for one in results:
        variants.setdefault(one["variant"], {})[one["seed"]] = one
    first = next(iter(variants))
    found = [[head.format(first) for head in HEAD]]
    for name, seeds in variants.items():
        before, after = (_matrix(seeds, when) for when in ("before", "after"))
        both = [seed for seed in seeds if seed in variants[first]] if name != first else []
        above = _matrix({seed: seeds[seed] for seed in both}, "after") if both else None
        if above is not None:
            above = above - _matrix({seed: variants[first][seed] for seed in both}, "after")
        minutes = np.mean([sum(one["minutes"].values()) for one in seeds.values()])
        tokens = np.mean([one["tokens"] for one in seeds.values()])
        found.append([
            name, str(len(seeds)), f"{before.mean():.3f}", f"{after.mean():.3f}", _between(after),
            f"{(after - before).mean():+.3f}", _between(after - before),
            *(["", ""] if above is None else [f"{above.mean():+.3f}", _between(above)]),
            f"{minutes:.1f}", f"{tokens:.0f}",
        ])  # fmt: skip
    return found


def _matrix(seeds: Mapping[int, Json], when: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The mean reward of each held-out task: a row for each seed. All have the same tasks."""
    rows = [one["held_out"][when]["by_task"] for one in seeds.values()]
    return np.asarray([[row[task] for task in rows[0]] for row in rows], dtype=float)


def bootstrap_both(values: np.ndarray[tuple[int, int], np.dtype[np.float64]], seed: int = 0) -> Interval:
    """Return the 95 % interval of the mean of seeds x tasks; both are resampled, each by itself (Owen 2007).

    With one seed it says how sure the tasks are, and nothing of other seeds.
    """
    rng, (seeds, tasks) = np.random.default_rng(seed), values.shape
    by_task = rng.multinomial(seeds, [1 / seeds] * seeds, RESAMPLES) @ values / seeds
    means = (by_task * rng.multinomial(tasks, [1 / tasks] * tasks, RESAMPLES)).sum(axis=1) / tasks
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(low), float(high))


def _between(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> str:
    interval = bootstrap_both(values)
    return f"{interval.low:.3f} to {interval.high:.3f}"


def draw(results: Sequence[Json], path: Path) -> Path:
    """Save the curves: the rewards of each step, over the rollouts so far; dots: held-out tasks. LightningError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise LightningError("the curves need matplotlib: pip install 'lightning-proxy[demo]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(one["variant"] for one in results))}
    labelled: set[str] = set()
    for one in results:
        name, colour = one["variant"], colours[one["variant"]]
        steps = [step for step in one["steps"] if step["reward_mean"] is not None]
        seen = list(accumulate(step["rollouts"] for step in steps))
        label = None if name in labelled else name
        means = [step["reward_mean"] for step in steps]
        axes.plot(seen, means, marker=".", color=colour, alpha=0.6, linewidth=1, label=label)
        labelled.add(name)
        ends = [one["held_out"][when]["mean_reward"] for when in ("before", "after")]
        axes.plot([0, one["rollouts"]], ends, "o", color=colour, fillstyle="none")
    axes.set(xlabel="rollouts", ylabel="mean reward (rings: held-out tasks)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path
