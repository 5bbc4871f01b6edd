"""The table of an experiment: means and intervals over seeds and tasks, by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_proxy.commands.trial import draw
from lightning_proxy.core.errors import LightningError
from lightning_proxy.core.statistics import bootstrap_mean
from lightning_proxy.features.experiment.experiment import few_seeds, lines, write


def result(variant: str, seed: int, *after: float) -> dict[str, Any]:
    held_out = {
        when: {"mean_reward": sum(rewards) / 4, "by_task": dict(zip("abcd", rewards, strict=True))}
        for when, rewards in (("before", (0.0,) * 4), ("after", after))
    }
    about = {"variant": variant, "seed": seed, "made_with": {"samples": 3}, "minutes": {"start": 1, "training": 2}}
    return about | {"held_out": held_out, "tokens": 9, "rollouts": 16, "steps": [{}]}


def test_variants_are_compared_on_the_same_seeds_and_tasks() -> None:
    """Each task is better by 0.25 with either seed, so the difference is certain although the rewards differ much."""
    results = [result("first", 0, 0, 0.25, 0.5, 0.75), result("first", 1, 0.5, 0, 0.25, 0)]
    results += [result("second", 0, 0.25, 0.5, 0.75, 1), result("second", 1, 0.75, 0.25, 0.5, 0.25)]
    results.append(result("second", 2, 1, 1, 1, 1))  # no partner
    head, first, second = lines(results)
    assert head[7] == "above first" and first[7:9] == ["", ""]
    assert second[7:9] == ["+0.250", "0.250 to 0.250"]
    assert (first[3], second[3], second[1]) == ("0.281", "0.688", "3")
    assert second[9:] == ["0.625 0.438 1.000", "4", "3", "3.0", "9"]


def test_the_interval_holds_seeds_and_tasks() -> None:
    seeds = bootstrap_mean(np.array([[0.0] * 40, [1.0] * 40]))
    assert (seeds.low, seeds.high) == (0.0, 1.0)  # two seeds that differ: the many tasks make nothing sure


def test_results_are_written_for_a_paper_with_a_warning_where_seeds_are_few(tmp_path: Path) -> None:
    results = [result("first", seed, 0, 0, 0, 1) for seed in range(5)]
    assert few_seeds(results) is None
    results.append(result("second", 0, 0, 0, 1, 1))
    write(results, tmp_path)
    head, rule, first, second, *notes = (tmp_path / "results.md").read_text().splitlines()
    assert head.startswith("| variant | seeds | before | after |") and rule.startswith("| --- | ---: |")
    assert first.startswith("| first | 5 | 0.000 | 0.250 |") and "| 0.500 | 4 | 3 |" in second
    assert notes[-1].startswith("fewer than 5 seeds (second has 1): ")
    sheet = [*csv.DictReader((tmp_path / "results.csv").read_text().splitlines())]
    assert [row["seed"] for row in sheet] == [*"012340"] and sheet[5]["after"] == "0.5"
    whole = json.loads((tmp_path / "results.json").read_text())
    assert whole["runs"] == results and whole["packages"]["numpy"] == np.__version__


def test_without_matplotlib_the_curves_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(LightningError, match="the curves need matplotlib: pip install 'lightning-proxy\\[demo\\]'"):
        draw([], tmp_path / "curves.png")
