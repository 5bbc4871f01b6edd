"""`make bench-store` in its small form: it asks every route that is read, and takes every look."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.loading import load_module
from support.paths import ROOT


def test_the_benchmark_of_the_store_asks_every_route_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "store.md"
    command = [sys.executable, str(ROOT / "benchmarks/store.py"), "--small", "--page", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = page.read_text()
    assert told.splitlines()[-1] in done.stdout
    assert not re.findall(r"\(\d{3}\)` ?\|", told)
    for when in ("a request", "a call", "a second", "a poll", "a step"):
        assert f"| {when} |" in told
    assert "`GET /rollouts/long/transitions`" in told


def test_a_run_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = load_module(ROOT / "benchmarks" / "report.py")
    page = report.Page("What it costs")
    page.table("In ms:", ("what", "ms"), [("a call", 1.5)])
    page.text(["Nothing else."])
    page.save(tmp_path / "new" / "costs.md")
    text = (tmp_path / "new" / "costs.md").read_text()
    assert text.startswith("# What it costs\n\n`python benchmarks/")
    assert "\n\nIn ms:\n\n| what | ms |\n| --- | --- |\n| a call | 1.5 |\n\nNothing else.\n" in text
