"""The pages of benchmarks/results/: made from JSON, each with how it was made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.loading import load_module
from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
results_page = load_module(ROOT / "benchmarks" / "results_page.py")


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_each_page_says_how_its_figures_were_made(page: Path) -> None:
    head = page.read_text()[:1500]
    assert re.search(r"\bcommits? [0-9a-f]{7}", head)
    assert re.search(r"\b2026-\d\d-\d\d", head)
    assert re.search(r"\bcores?\b|simulated", head)
    assert re.search(r"`[^`]*(python|make|pytest|lightning-proxy) [^`]+`", head)


@pytest.mark.parametrize("figures", sorted(RESULTS.glob("*.json")), ids=lambda figures: figures.name)
def test_a_page_with_figures_beside_it_is_made_of_them(figures: Path) -> None:
    assert results_page.markdown(json.loads(figures.read_text())) == figures.with_suffix(".md").read_text()


def test_a_run_writes_its_page_and_its_figures(tmp_path: Path) -> None:
    page = results_page.Page("What it costs")
    page.table("In ms:", ("what", "ms"), [("a call", 1.5)])
    page.text(["Nothing else."])
    page.save(tmp_path / "new" / "costs.md")
    text = (tmp_path / "new" / "costs.md").read_text()
    assert text.startswith("# What it costs\n\n`python benchmarks/")
    assert "In ms:\n\n| what | ms |\n| --- | --- |\n| a call | 1.5 |\n\nNothing else.\n" in text
    assert (tmp_path / "new" / "costs.json").is_file()
    assert f"commit {page.figures['commit']}, {page.figures['date']}" in text


def test_findings_stay_when_figures_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.md"
    path.with_suffix(".json").write_text(json.dumps({"findings": ["A call costs", "nothing."]}))
    page = results_page.Page("What it costs")
    page.table("", ("what",), [("a call",)])
    page.save(path)
    assert path.read_text().endswith(".\n\nA call costs\nnothing.\n\n| what |\n| --- |\n| a call |\n")
    page.save(path)
    assert json.loads(path.with_suffix(".json").read_text())["findings"] == ["A call costs", "nothing."]
