"""The page of a benchmark: benchmarks/results/NAME.md, made from NAME.json beside it.

A benchmark fills a `Page` with tables and saves it if `--page` is given.
`python benchmarks/results_page.py FILE.json` makes the page again from figures that were measured before.
`findings` there are lines written by hand: what the tables show. They stay when figures are measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Page:
    """Tables of one run, with the command, machine, commit and date that they were made with."""

    def __init__(self, title: str) -> None:
        self.figures: dict[str, Any] = {"title": title, **made(), "parts": []}

    def table(self, about: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table, and print its rows as they come."""
        part: dict[str, Any] = {"about": about, "head": list(head), "rows": []}
        self.figures["parts"].append(part)
        print("\n" + "\n".join(_lines(part)), flush=True)
        for row in rows:
            part["rows"].append([str(cell) for cell in row])
            print(_line(part["rows"][-1]), flush=True)

    def text(self, lines: Iterable[str]) -> None:
        """Add lines of Markdown and print them."""
        part = {"lines": list(lines)}
        self.figures["parts"].append(part)
        print("\n" + "\n".join(_lines(part)), flush=True)

    def save(self, page: Path | None) -> None:
        """Write the figures and the page, if `page` names one, with the findings that are there."""
        if page is not None:
            page.parent.mkdir(parents=True, exist_ok=True)
            file = page.with_suffix(".json")
            if file.exists() and (findings := json.loads(file.read_text()).get("findings")):
                self.figures["findings"] = findings
                print(f"\nRead the findings in {file} again: they were written before.")
            file.write_text(json.dumps(self.figures, indent=1, ensure_ascii=False) + "\n")
            page.write_text(markdown(self.figures))


def option(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `--page [FILE]`, which stands for results/NAME.md without a file."""
    default = RESULTS / f"{name}.md"
    parser.add_argument(
        "--page", type=Path, nargs="?", const=default, help=f"write benchmarks/results/{name}.md, or FILE"
    )


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


def markdown(figures: dict[str, Any]) -> str:
    """Return the page of the figures that `Page.save` wrote."""
    how = f"`{figures['command']}`\non {figures['machine']}, commit {figures['commit']}, {figures['date']}."
    parts = [{"lines": figures["findings"]}] if "findings" in figures else []
    parts += figures["parts"]
    return "\n\n".join([f"# {figures['title']}", how, *("\n".join(_lines(part)) for part in parts)]) + "\n"


def _lines(part: dict[str, Any]) -> list[str]:
    if "lines" in part:
        return list(part["lines"])
    rows = [part["head"], ["---"] * len(part["head"]), *part["rows"]]
    return [*([part["about"], ""] if part["about"] else []), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).with_suffix(".md").write_text(markdown(json.loads(Path(name).read_text())))
