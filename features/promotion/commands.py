"""Adds the test of a policy version to `status` and `policy list`: its numbers as they grow, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...commands.formats import count, number, plain, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


def status_rows(status: dict[str, Any]) -> Iterator[tuple[str, Text]]:
    """Yield the test of the next version."""
    if test := status["policy"]["test"]:
        yield "promotion", line_of(test)


def below_versions(policy: dict[str, Any], versions: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Yield the last test that is over, and the one that is under way, each with a line per metric."""
    tests = sorted((v["promotion"] for v in versions if v["promotion"]), key=lambda test: test["n"])
    over = [test for test in tests if test["status"] != "testing"]
    for test in (*over[-1:], *(test for test in tests if test["status"] == "testing")):
        yield plain("")
        yield line_of(test)
        if evidence := test["evidence"]:
            rows = [_cells(name, one, evidence) for name, one in evidence["metrics"].items()]
            heads = ("pairs", "live", "candidate", "diff.", "may be", "worse", "safe", "so far")
            yield table("metric", right=heads, rows=rows, padding=(0, 1))


def line_of(test: dict[str, Any]) -> Text:
    """Return one line about a test (`Promotion` of the API)."""
    versions, evidence = f"version {test['version']} against {test['against']}", test["evidence"]
    if test["status"] == "ended":
        return plain(f"the test of {versions} was ended: {test['reason']}")
    if test["status"] != "testing":
        return plain(f"{test['status']} {versions} after {count(evidence.get('rollouts'))} rollouts: {test['reason']}")
    text = "not weighed yet"
    if evidence:
        failed, left_out = (sum(evidence[s][what] for s in ("candidate", "live")) for what in ("failed", "unrewarded"))
        text = f"{count(evidence['rollouts'])} of at most {count(evidence['max_rollouts'])} rollouts"
        text += f", {count(evidence['groups'])} groups, {count(failed)} failed, {count(left_out)} without a reward"
    if "waits" in evidence:
        text += f"; it may go live, but {evidence['waits']}"
    return plain(f"testing {versions}: {text}", "yellow")


def _cells(name: str, one: dict[str, Any], evidence: dict[str, Any]) -> tuple[Any, ...]:
    """One line. An e-value of 1 / level excludes a drop; to show one takes so many times more as there are metrics."""
    needed, low_high = 1 / evidence["level"], one["interval"]
    return (
        name, count(one["pairs"]), number(one["live"]), number(one["candidate"]),
        None if one["difference"] is None else f"{one['difference']:+.2f}",
        low_high and f"{low_high[0]:+.2f}…{low_high[1]:+.2f}",
        f"{number(one['e_drop'], 2)}/{number(len(evidence['metrics']) * needed)}",
        f"{number(one['e_safe'], 2)}/{number(needed)}", one["verdict"],
    )  # fmt: skip
