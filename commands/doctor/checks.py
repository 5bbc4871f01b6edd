"""A check of `doctor`: a row has a name, a probe that says what it found, and what to do if that is not well."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal

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


class Finding(Exception):
    """What a probe found that is not well. `fix`: in place of its row's."""

    outcome: Outcome = "failed"

    def __init__(self, found: str, fix: str | None = None) -> None:
        super().__init__(found)
        self.fix = fix


class Doubt(Finding):
    """What is not well, and breaks nothing."""

    outcome = "warning"


async def check(name: str, probe: Awaitable[str], fix: str) -> Check:
    """Return the row's check. What the probe returns is well; errors mean that it failed."""
    try:
        return Check(name, "ok", await probe)
    except Finding as finding:
        return Check(name, finding.outcome, str(finding), finding.fix or fix)
    except LightningError as error:
        found = error.message
    except (aiohttp.ClientError, TimeoutError) as error:
        found = without_secrets(str(error)) or "no answer in time"
    except OTHER_SHAPE:
        found = "an answer has another shape than expected"
    return Check(name, "failed", found, fix)


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
