"""A check of `doctor`: a row has a name, a probe that says what it found, and what to do if that is not well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn

import aiohttp
from rich.table import Table

from ...core.config.address import without_secrets
from ...core.errors import LightningError
from ..formats import plain

Outcome = Literal["ok", "warning", "failed"]
STYLE = {"ok": "green", "warning": "yellow", "failed": "bold red"}
# What reading an answer raises that has another shape than it should.
OTHER_SHAPE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)


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


class Finding(Exception):
    """What a probe found that is not well. `fix`: in place of its row's."""

    def __init__(self, found: str, fix: str | None = None, outcome: Outcome = "failed") -> None:
        super().__init__(found)
        self.found, self.fix, self.outcome = found, fix, outcome


async def check(name: str, probe: Awaitable[str], fix: str) -> Check:
    """Return the row's check. What the probe returns is well; errors mean that it failed."""
    try:
        return ok(name, await probe)
    except Finding as finding:
        return Check(name, finding.outcome, finding.found, finding.fix or fix)
    except LightningError as error:
        return failed(name, error.message, fix)
    except (aiohttp.ClientError, TimeoutError) as error:
        return failed(name, without_secrets(str(error)) or "no answer in time", fix)
    except OTHER_SHAPE:
        return failed(name, "an answer has another shape than expected", fix)


def checks_table(checks: Sequence[Check], widths: tuple[int, int] = (0, 0)) -> Table:
    """Return a table with a line per check and the fix under it. `widths`: the least of the first two columns."""
    table = Table.grid(padding=(0, 2))
    for width in widths:
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for one in checks:
        table.add_row(plain(one.outcome, STYLE[one.outcome]), plain(one.name), plain(one.found))
        if one.fix:
            table.add_row("", "", plain(f"→ {one.fix}"))
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

    def fail(self, name: str, found: str, fix: str) -> NoReturn:
        """Show a check that failed. Raise Broken."""
        self(Check(name, "failed", found, fix))
        raise Broken

    @contextmanager
    def errors(self, name: str, fix: str) -> Iterator[None]:
        """Show a LightningError of the block as a check that failed, and raise Broken."""
        try:
            yield
        except LightningError as error:
            self.fail(name, error.message, fix)
