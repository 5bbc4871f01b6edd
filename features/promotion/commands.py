"""Adds a line about a version's test to `status` and `policy list`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...commands.formats import count, plain

if TYPE_CHECKING:
    from rich.text import Text


def status_rows(status: dict[str, Any]) -> Iterator[tuple[str, Text]]:
    if test := status["policy"]["test"]:
        yield "promotion", line_of(test)


def below_versions(policy: dict[str, Any], versions: list[dict[str, Any]]) -> Iterator[Text]:
    """Yield a line about the newest test, running or finished."""
    if tests := [version["promotion"] for version in versions if version["promotion"]]:
        yield plain("")
        yield line_of(max(tests, key=lambda test: test["n"]))


def line_of(test: dict[str, Any]) -> Text:
    versions, evidence = f"version {test['version']} against {test['against']}", test["evidence"]
    if test["status"] != "testing":
        return plain(f"the test of {versions} is over ({test['status']}): {test['reason']}")
    if not evidence:
        return plain(f"testing {versions}: no proxy with promotion.mode gated has looked at it yet", "yellow")
    text = f"{count(evidence['rollouts'])} of at most {count(evidence['max_rollouts'])} rollouts"
    if not evidence["rollouts"]:
        text += " that an admin's or an evaluator's key opened or rewarded"
    for name, one in evidence["metrics"].items():
        text += f"; {name} {one['difference'] or 0:+.2f} ({count(one['pairs'])} pairs, {one['verdict']})"
    if "waits" in evidence:
        text += f"; it may go live, but {evidence['waits']}"
    return plain(f"testing {versions}: {text}", "yellow")
