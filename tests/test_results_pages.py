"""The pages of benchmarks/results/: each says how it was made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.loading import load_module
from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_each_page_says_how_its_figures_were_made(page: Path) -> None:
    head = page.read_text()[:1500]
    assert re.search(r"\bcommits? [0-9a-f]{7}", head)
    assert re.search(r"\b2026-\d\d-\d\d", head)
    assert re.search(r"\bcores?\b|simulated", head)
    assert re.search(r"`[^`]*(python|make|pytest|lightning-proxy) [^`]+`", head)


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
