"""Summarises what rescoring changed, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import typer

from ...commands.formats import number, print_json
from .results import RescoredRollout

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Change:
    """One reward's name: how many rollouts got it, how it compares with their old values, and both means.

    `mean_before` is over the rollouts that had one.
    """

    name: str
    rollouts: int
    new: int
    higher: int
    lower: int
    same: int
    mean_before: float | None
    mean_after: float


def changes(scored: Sequence[RescoredRollout]) -> list[Change]:
    """Return the changes by the reward's name."""
    names = sorted({name for one in scored for name in one.values})
    return [_change(name, [(one.before.get(name), one.values[name]) for one in scored if name in one.values])
            for name in names]  # fmt: skip


def _change(name: str, pairs: Sequence[tuple[float | None, float]]) -> Change:
    known = [(before, after) for before, after in pairs if before is not None]
    higher, lower = sum(after > before for before, after in known), sum(after < before for before, after in known)
    return Change(
        name, len(pairs), new=len(pairs) - len(known), higher=higher, lower=lower, same=len(known) - higher - lower,
        mean_before=fmean(before for before, _ in known) if known else None,
        mean_after=fmean(after for _, after in pairs),
    )  # fmt: skip


def show(scored: Sequence[RescoredRollout], there_before: int, counted: Mapping[str, float], *, as_json: bool) -> None:
    """Print the summary. `counted`: the names that count in training."""
    found = changes(scored)
    failed = [one for one in scored if one.error is not None]
    silent = len(scored) - len(failed) - sum(bool(one.values) for one in scored)
    if as_json:
        counts: dict[str, Any] = {"asked": len(scored), "failed": len(failed), "without_reward": silent}
        print_json(counts | {"scored_before": there_before, "rewards": [asdict(change) for change in found]})
        return
    _print_table(found, scored)
    print(f"{len(scored)} rollouts asked about, {len(failed)} failed, {silent} without a reward, "
          f"{there_before} scored by this version before")  # fmt: skip
    for one in failed[:SHOWN]:
        typer.echo(f"lightning-proxy: no reward for rollout {one.rollout_id}: {one.error}", err=True)
    if len(failed) > SHOWN:
        typer.echo(f"lightning-proxy: and for {len(failed) - SHOWN} more", err=True)
    if found and not counted.keys() & {change.name for change in found}:
        names = " or ".join(change.name for change in found)
        typer.echo(f"lightning-proxy: {names} does not count in training, only {', '.join(counted)} does: name the "
                   "function so, or add the name to trainer.reward_weights", err=True)  # fmt: skip


def _print_table(found: Sequence[Change], scored: Sequence[RescoredRollout]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not found:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("reward", "rollouts", "new", "higher", "lower", "same", "mean before", "after"):
        table.add_column(heading, justify="left" if heading == "reward" else "right")
    for change in found:
        counts = map(str, (change.rollouts, change.new, change.higher, change.lower, change.same))
        table.add_row(change.name, *counts, number(change.mean_before), number(change.mean_after))
    console = Console()
    console.print(table)
    moved = sorted(
        (
            (abs(after - one.before[name]), one, name)
            for one in scored
            for name, after in one.values.items()
            if after != one.before.get(name, after)
        ),
        key=lambda move: -move[0],
    )
    for _, one, name in moved[:SHOWN]:
        line = f"{name} {number(one.before[name])} -> {number(one.values[name])}  rollout {one.rollout_id}"
        console.print(line + (f"  task {one.task_id}" if one.task_id else ""), markup=False, highlight=False)
    if len(moved) > SHOWN:
        console.print(f"and {len(moved) - SHOWN} more changed", highlight=False)
