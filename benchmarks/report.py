"""What a benchmark prints, and writes to a page; the table of the proxy's figures."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from targets import COMMITTING

Figures = dict[str, Any]
Case = tuple[str, int, int]
HERE = Path(__file__).parent


class Page:
    """Tables of one run, printed as they come, with the command, machine, commit and date that they were made with."""

    def __init__(self, title: str) -> None:
        how = made()
        self._lines = [f"# {title}", "", f"`{how['command']}`"]
        self._lines.append(f"on {how['machine']}, commit {how['commit']}, {how['date']}.")

    def table(self, about: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.text([about, ""] if about else [])
        for row in (head, ["---"] * len(head), *rows):
            self._add(_line(*map(str, row)))

    def text(self, lines: Iterable[str]) -> None:
        for line in ("", *lines):
            self._add(line)

    def _add(self, line: str) -> None:
        self._lines.append(line)
        print(line, flush=True)

    def save(self, page: Path | None) -> None:
        """Write the page, if `page` names one."""
        if page is not None:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text("\n".join(self._lines) + "\n")


def option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", type=Path, metavar="FILE", help="write what is printed to this file, too")


def made() -> dict[str, str]:
    """Return the command, machine, commit and date of this run."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return {"command": command, "machine": machine(), "commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def machine() -> str:
    """Return the number and model of the cores, and Python's version."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores{f' ({model})' if model else ''}, Python {platform.python_version()}"


def of_proxy(figures: Figures) -> str:
    """Return what `proxy.py` measured as Markdown."""
    rows = {((r["kind"], r["prompt"], r["connections"]), r["target"]): r for r in figures["rows"]}
    cases = list(dict.fromkeys(sorted((case for case, _ in rows), key=lambda c: (c[0] != "JSON", c))))
    names = list(figures["memory_mib"])
    variants = [name for name in names if name.startswith("ours, ")]
    peers = [name for name in names if name not in ("direct", "forwarder", COMMITTING, "ours", *variants)]
    parts = [f"`{figures['command']}` on {figures['machine']}; client and model server share the cores.", ""]
    parts += [*_floor(rows, cases), ""]
    parts += [*_beside(rows, cases, peers, "times"), ""] if peers else []
    parts += [*_beside(rows, cases, variants, "of"), ""] if variants else []
    parts += _memory(figures)
    parts += [f"Left out: {reason}" for reason in figures["left_out"]]
    parts += [f"FAILED: {reason}" for reason in figures["failed"]]
    return "\n".join(parts)


def _floor(rows: dict[tuple[Case, str], Figures], cases: list[Case]) -> Iterable[str]:
    yield from _head(
        "answers", "prompt", "connections", "direct", "forwarder", COMMITTING, "lightning-proxy", "ratio to the first",
        "to the second", "CPU a call, forwarder → it commits → ours", "added to the median", "added to the first byte",
    )  # fmt: skip
    for case in cases:
        direct, floor, commits, ours = (rows.get((case, name)) for name in ("direct", "forwarder", COMMITTING, "ours"))
        if not (direct and floor and commits and ours):
            continue
        yield _line(
            *_case(case), *(f"{_number(r['per_s'])}/s" for r in (direct, floor, commits, ours)),
            *(f"**{ours['per_s'] / other['per_s']:.2f}**" for other in (floor, commits)),
            " → ".join(f"{r['cpu_ms']:.2f}" for r in (floor, commits, ours)) + " ms",
            *(f"{ours[key] - floor[key]:+.2f} ms" for key in ("p50_ms", "first_ms")),
        )  # fmt: skip


def _beside(rows: dict[tuple[Case, str], Figures], cases: list[Case], names: list[str], how: str) -> Iterable[str]:
    """`times`: how many times theirs ours is; `of`: theirs as a share of ours. CPU: their processor time by ours."""
    yield from _head("answers", "prompt", "connections", "lightning-proxy", *names)
    for case in cases:
        ours, cells = rows.get((case, "ours")), []
        for name in names:
            theirs = rows.get((case, name))
            if ours is None or theirs is None:
                cells.append("–")
                continue
            speed, work = ours["per_s"] / theirs["per_s"], theirs["cpu_ms"] / max(ours["cpu_ms"], 1e-3)
            told = f"**{speed:.1f} ×**, CPU {work:.1f} ×" if how == "times" else f"**{1 / speed:.2f}**, CPU {work:.2f}"
            cells.append(f"{_number(theirs['per_s'])}/s, {told}")
        if ours and set(cells) != {"–"}:
            yield _line(*_case(case), f"{_number(ours['per_s'])}/s", *cells)


def _memory(figures: Figures) -> Iterable[str]:
    if streams := figures["streams"]:
        yield (
            f"{streams['n']:,} streams open at once: {streams['mib']:.0f} MiB ({streams['mib_before']:.0f} before), "
            f"opened in {streams['seconds']:.1f} s."
        )
    yield "Memory at first, after the load, and at its peak in MiB: " + "; ".join(
        f"{name} {before:.0f}, {after:.0f}, {peak:.0f}"
        for name, (before, after, peak) in figures["memory_mib"].items()
        if name != "direct"
    )


def _case(case: Case) -> tuple[str, str, str]:
    kind, prompt, connections = case
    return kind, f"{prompt // 1000:,} KB", str(connections)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def _head(*names: str) -> Iterable[str]:
    return [_line(*names), "|" + "---|" * len(names)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
