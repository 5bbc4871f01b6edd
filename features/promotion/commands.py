"""Adds the test of a policy version to `status` and `policy list`: its numbers as they grow, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...commands.formats import count, number, plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

COLUMNS = ("metric", "pairs", "live", "candidate", "diff.", "may be", "worse", "safe", "so far")


def status_rows(status: dict[str, Any]) -> Iterator[tuple[str, Text | str]]:
    """Yield the test of the next version, and the version that waits for one."""
    policy = status["policy"]
    if policy["test"]:
        yield "promotion", line_of(policy["test"])
    if policy["waiting"] is not None:
        yield "  waits", f"version {policy['waiting']} is tested next"


def below_versions(policy: dict[str, Any], versions: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Yield the last test that is over, and the one that is under way."""
    from rich.text import Text

    tests = sorted((v["promotion"] for v in versions if v["promotion"]), key=lambda test: test["n"])
    over = [test for test in tests if test["status"] != "testing"]
    for test in (*over[-1:], *(test for test in tests if test["status"] == "testing")):
        yield Text("")
        yield line_of(test)
        if (table := table_of(test)) is not None:
            yield table


def line_of(test: dict[str, Any]) -> Text:
    """Return one line about a test (`Promotion` of the API)."""
    versions = f"version {test['version']} against {test['against']}"
    match test["status"]:
        case "testing":
            return plain(f"testing {versions}: {_progress(test['evidence'])}", "yellow")
        case "ended":
            return plain(f"the test of {versions} was ended: {test['reason']}")
    evidence = test["evidence"]
    return plain(f"{test['status']} {versions} after {count(evidence.get('rollouts'))} rollouts: {test['reason']}")


def _progress(evidence: dict[str, Any]) -> str:
    if not evidence:
        return "not weighed yet"
    left_out = evidence["candidate"]["unrewarded"] + evidence["live"]["unrewarded"]
    failed = evidence["candidate"]["failed"] + evidence["live"]["failed"]
    text = f"{count(evidence['rollouts'])} of at most {count(evidence['max_rollouts'])} rollouts"
    text += f", {count(evidence['groups'])} groups, {count(failed)} failed, {count(left_out)} without a reward"
    return f"{text}; it may go live, but {evidence['waits']}" if "waits" in evidence else text


def table_of(test: dict[str, Any]) -> Table | None:
    """Return one line per metric; None before the first numbers."""
    from rich.table import Table

    evidence = test["evidence"]
    if not evidence:
        return None
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("metric", "so far") else "right", overflow="fold")
    needed = 1 / evidence["level"]
    for name, one in evidence["metrics"].items():
        table.add_row(*_cells(name, one, needed, len(evidence["metrics"])))
    return table


def _cells(name: str, one: dict[str, Any], needed: float, metrics: int) -> Iterator[str | Text]:
    """One line. `needed`: the e-value that excludes a drop; to show one takes so many times more as `metrics` are."""
    yield from (plain(name), count(one["pairs"]), number(one["live"]), number(one["candidate"]))
    yield _signed(one["difference"])
    yield "-" if one["interval"] is None else "…".join(map(_signed, one["interval"]))
    yield from (
        f"{number(one['e_drop'], 2)}/{number(metrics * needed)}",
        f"{number(one['e_safe'], 2)}/{number(needed)}",
    )
    yield one["verdict"]


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
