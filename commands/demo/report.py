"""Shows the demo's result: a table and a curve in the terminal, the curve as a PNG, everything as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..formats import share
from ..run.summary import Totals


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The demo's result. `curve` has the mean reward of each step's worth of training rollouts, in order.

    `best`: the best version, in words. `steps_before`: those before it was resumed; the times are of the others.
    """

    seed: int
    steps: int
    version: int
    before: Totals
    after: Totals
    curve: tuple[float, ...]
    training_s: float
    total_s: float
    best: str | None = None
    steps_before: int = 0


def curve(rewards: Sequence[float], window: int) -> tuple[float, ...]:
    """Return the mean of each full window of consecutive rewards."""
    full = range(0, len(rewards) - window + 1, window)
    return tuple(sum(rewards[start : start + window]) / window for start in full)


def show(result: DemoResult, console: Console) -> None:
    """Print the table and the curve."""
    table = Table(title="held-out tasks, through the live proxy")
    for column in ("", "policy version", "rollouts", "exact answers", "mean reward"):
        table.add_column(column, justify="left" if not column else "right")
    for name, version, totals in (("before", 0, result.before), ("after", result.version, result.after)):
        table.add_row(name, str(version), str(totals.rollouts), share(totals.solved), _number(totals.mean_reward))
    console.print(table)
    if len(result.curve) > 1:
        console.print(terminal_curve(result.curve, min(console.width, 100)), markup=False, highlight=False)
    since = f", {result.steps_before} of them before it was resumed, the others" * bool(result.steps_before)
    console.print(
        f"{result.steps} steps{since} in {result.training_s / 60:.1f} min, {result.total_s / 60:.1f} min in all"
    )
    if result.best is not None:
        console.print(f"the best is {result.best}")


def terminal_curve(values: Sequence[float], width: int) -> str:
    """Draw the reward curve in characters, without colours."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 15)
    figure.title("mean training reward, by steps' worth of rollouts")
    figure.draw(figure.signal(list(range(1, len(values) + 1)), list(values)).lines())
    return str(plotext.uncolorize(str(figure.build())))


def save_png(result: DemoResult, path: Path) -> None:
    """Save the reward curve as a picture, with both evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(result.curve) + 1), result.curve, label="training rollouts")
    for totals, label, x in ((result.before, "held out, before", 0), (result.after, "held out, after", None)):
        if totals.mean_reward is not None:
            position = len(result.curve) if x is None else x
            axes.plot([position], [totals.mean_reward], "o", label=f"{label}: {totals.mean_reward:.2f}")
    axes.set(xlabel="steps' worth of rollouts", ylabel="mean reward", ylim=(0, 1.05), title=f"seed {result.seed}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
