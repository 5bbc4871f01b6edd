"""A check of `doctor`; the table of checks, and the checks of `--learn`, shown up to the first that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from ..formats import plain

Outcome = Literal["ok", "warning", "failed"]
STYLE = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One checked link of the chain. `fix` says what to do unless it is ok."""

    name: str
    outcome: Outcome
    found: str
    fix: str | None = None


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warning(name: str, found: str, fix: str) -> Check:
    return Check(name, "warning", found, fix)


def failed(name: str, found: str, fix: str) -> Check:
    return Check(name, "failed", found, fix)


def checks_table(checks: Sequence[Check], widths: tuple[int, int] = (0, 0)) -> Table:
    """Return a table with a line per check and the fix under it. `widths`: the least of the first two columns."""
    table = Table.grid(padding=(0, 2))
    for width in widths:
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(plain(check.outcome, STYLE[check.outcome]), plain(check.name), plain(check.found))
        if check.fix:
            table.add_row("", "", plain(f"→ {check.fix}"))
    return table


class Broken(Exception):
    """A check failed, and those after it would say nothing."""


class Report:
    """Shows checks, and keeps them."""

    def __init__(self, show: Callable[[Check], None]) -> None:
        self.checks: list[Check] = []
        self._show = show

    def __call__(self, check: Check) -> None:
        """Show a check. Raise Broken if it failed."""
        self.checks.append(check)
        self._show(check)
        if check.outcome == "failed":
            raise Broken
