"""Shows checks as they are made, up to the first that failed."""

from __future__ import annotations

from collections.abc import Callable

from ..checks import Check


class Broken(Exception):
    """A check failed, and those after it would say nothing."""


class Tell:
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
