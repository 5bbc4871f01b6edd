"""The table at the end of `make test-frameworks`."""

from __future__ import annotations

import os
import sys

import pytest

from support.left_open import start_reaper

if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:
    start_reaper()

COLUMNS = ["framework", "version", "calls", "tool results", "streamed", "unnamed", "seconds"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ended = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    reports = [report for report in ended if report.user_properties]
    if not reports:
        return
    rows = [[*COLUMNS, "outcome"]]
    for report in reports:
        said = dict(report.user_properties) | {"seconds": f"{report.duration:.0f}"}
        rows.append([str(said.get(name, "–")) for name in COLUMNS] + [outcome(report)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("frameworks")
    for row in rows:
        terminalreporter.write_line("  ".join(map(str.ljust, row, widths)).rstrip())


def outcome(report: pytest.TestReport) -> str:
    """`finished`, or the first line of what went wrong."""
    if report.passed:
        return "finished"
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).splitlines()[0][:100]
