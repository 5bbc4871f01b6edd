"""The table of an experiment: means and intervals over seeds and tasks, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_proxy.commands.trial import draw
from lightning_proxy.core.errors import LightningError
from lightning_proxy.core.statistics import bootstrap_mean
from lightning_proxy.features.experiment.experiment import bootstrap_both, lines, show


def result(variant: str, seed: int, *after: float) -> dict[str, Any]:
    held_out = {
        when: {"mean_reward": 0.0, "by_task": dict(zip("abcd", rewards, strict=True))}
        for when, rewards in (("before", (0.0,) * 4), ("after", after))
    }
    return {"variant": variant, "seed": seed, "held_out": held_out, "minutes": {"start": 1, "training": 2}, "tokens": 9}


def test_variants_are_compared_on_the_same_seeds_and_tasks() -> None:
    """Each task is better by 0.25 with either seed, so the difference is certain although the rewards differ much."""
    results = [result("first", 0, 0, 0.25, 0.5, 0.75), result("first", 1, 0.5, 0, 0.25, 0)]
    results += [result("second", 0, 0.25, 0.5, 0.75, 1), result("second", 1, 0.75, 0.25, 0.5, 0.25)]
    results.append(result("second", 2, 1, 1, 1, 1))  # no partner
    head, first, second = lines(results)
    assert head[7] == "above first" and first[7:9] == ["", ""]
    assert second[7:9] == ["+0.250", "0.250 to 0.250"]
    assert (first[3], second[3], second[1], second[9:]) == ("0.281", "0.688", "3", ["3.0", "9"])


def test_the_interval_holds_seeds_and_tasks() -> None:
    tasks = [0.0, 0.25, 0.5, 1.0]
    one = bootstrap_both(np.array([tasks]))
    alone = bootstrap_mean(tasks, seed=0)
    assert (one.low, one.high) == pytest.approx((alone.low, alone.high), abs=0.07)
    seeds = bootstrap_both(np.array([[0.0] * 40, [1.0] * 40]))
    assert (seeds.low, seeds.high) == (0.0, 1.0)  # two seeds that differ: the many tasks make nothing sure


def test_one_seed_says_that_its_intervals_are_over_tasks_only(capsys: pytest.CaptureFixture[str]) -> None:
    show([result("first", 0, 0, 0, 0, 1), result("first", 1, 0, 0, 0, 1), result("second", 0, 0, 0, 1, 1)])
    assert capsys.readouterr().out.splitlines()[3:] == ["one seed (second): these intervals are over tasks only"]
    show([result("first", seed, 0, 0, 0, 1) for seed in (0, 1)])
    assert "one seed" not in capsys.readouterr().out


def test_without_matplotlib_the_curves_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(LightningError, match="the curves need matplotlib: pip install 'lightning-proxy\\[demo\\]'"):
        draw([], tmp_path / "curves.png")
