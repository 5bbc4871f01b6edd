"""`make bench-store` in its small form: it asks every route that is read, and takes every look."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def test_the_benchmark_of_the_store_asks_every_route_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "store.md"
    command = [sys.executable, str(ROOT / "benchmarks/store.py"), "--small", "--out", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = page.read_text()
    assert told in done.stdout
    assert not re.findall(r"\(\d{3}\)` ?\|", told)
    for when in ("a request", "a call", "a second", "a poll", "a step"):
        assert f"| {when} |" in told
    assert "`GET /rollouts/long/transitions`" in told
