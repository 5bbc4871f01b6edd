"""A check of `doctor`: a row has a name, a probe that says what it found, and what to do if that is not well."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from typing import Literal

import aiohttp
from rich.console import Console
from rich.table import Table

from ...core.config.address import without_secrets
from ...core.errors import LightningError
from ..formats import plain, print_json

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


class Broken(Exception):
    """A check failed, and later ones would say nothing."""


class Report:
    """Makes checks, shows each at once, or all as JSON at the end. `stops`: a check that fails raises Broken."""

    def __init__(self, *, as_json: bool, stops: bool = False) -> None:
        self.checks: list[Check] = []
        self._as_json, self._stops = as_json, stops

    async def check(self, name: str, probe: Awaitable[str], fix: str) -> Check:
        """Make a row's check. What the probe returns is well; errors mean that it failed."""
        outcome: Outcome = "failed"
        mend: str | None = fix
        try:
            outcome, found, mend = "ok", await probe, None
        except Finding as finding:
            outcome, found, mend = finding.outcome, str(finding), finding.fix or fix
        except LightningError as error:
            found = error.message
        except (aiohttp.ClientError, TimeoutError) as error:
            found = without_secrets(str(error)) or "no answer in time"
        except OTHER_SHAPE:
            found = "an answer has another shape than expected"
        self.add(name, outcome, found, mend)
        return self.checks[-1]

    def add(self, name: str, outcome: Outcome, found: str, fix: str | None = None) -> None:
        self.checks.append(Check(name, outcome, found, fix))
        if not self._as_json:
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True, min_width=7)
            table.add_column(no_wrap=True, min_width=18)
            table.add_column(overflow="fold")
            table.add_row(plain(outcome, STYLE[outcome]), plain(name), plain(found))
            if fix:
                table.add_row("", "", plain(f"→ {fix}"))
            Console(highlight=False).print(table)
        if self._stops and outcome == "failed":
            raise Broken

    def end(self) -> bool:
        """Print the JSON, if it is wanted, and return whether no check failed."""
        if self._as_json:
            print_json([asdict(check) for check in self.checks])
        return all(check.outcome != "failed" for check in self.checks)
