"""Whoever asks how far B is above A says the same numbers for the same rewards."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.commands.eval import EvalRow, report
from lightning_proxy.commands.run.run import RolloutResult
from lightning_proxy.core.statistics import compare
from lightning_proxy.proxy.api.policy import compared
from lightning_proxy.store.versions import TaskMean

# Two rewards of each of 20 tasks: too many for all patterns of signs to be tried. Their order is not that of names.
A = {f"t{19 - i}": (0.05 * i, 0.3) for i in range(20)}
B = {task: (first - 0.4 if i % 3 else first, 0.25) for i, (task, (first, _)) in enumerate(A.items())}
MEANS = [{task: sum(rewards) / 2 for task, rewards in side.items()} for side in (A, B)]


@pytest.fixture(scope="module")
def versus() -> dict[str, Any]:
    """What `eval` says of B, compared with A."""
    rows = [
        EvalRow(name, [RolloutResult("r", task, 0, None, reward) for task, own in side.items() for reward in own])
        for name, side in (("0", A), ("1", B))
    ]
    return dict(report(rows, {})["rows"][1]["versus"])


def test_policy_compare_and_optimize_have_the_numbers_of_eval(versus: dict[str, Any]) -> None:
    means = [
        TaskMean(version, "eval", task, mean, 2, mean * mean, 2)
        for version, side in enumerate(MEANS)
        for task, mean in side.items()
    ]
    route = compared(means, 0, 1, None)
    (low, high), interval = route.interval or (), versus["interval"]
    assert (route.difference, low, high) == pytest.approx((versus["difference"], interval["low"], interval["high"]))
    a, b = ([side[task] for task in sorted(side)] for side in MEANS)  # as the API lists them
    found = compare(b, a)
    assert (found.difference, found.p, found.tasks) == pytest.approx((versus["difference"], versus["p"], 20))


def test_an_experiment_of_one_seed_has_them(versus: dict[str, Any]) -> None:
    experiment = pytest.importorskip("lightning_proxy.features.experiment.experiment")
    results = [
        {
            "variant": name, "seed": 0, "made_with": {"samples": 2}, "minutes": {}, "tokens": 0,
            "held_out": {"before": {"by_task": MEANS[0]}, "after": {"by_task": side}},
        }
        for name, side in zip("ab", MEANS, strict=True)
    ]  # fmt: skip
    interval = versus["interval"]
    assert experiment.lines(results)[2][7:9] == [
        f"{versus['difference']:+.3f}", f"{interval['low']:.3f} to {interval['high']:.3f}",
    ]  # fmt: skip
