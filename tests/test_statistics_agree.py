"""Whoever asks how far B is above A, or whether it is worse, says the same numbers for the same rewards."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.commands.eval import EvalRow, report
from lightning_proxy.commands.run.run import RolloutResult
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import Reward
from lightning_proxy.core.statistics import compare, difference, evidence_of
from lightning_proxy.proxy.api.policy import compared
from lightning_proxy.store.versions import TaskMean

# Two rewards of each of 20 tasks: too many to try all patterns of signs. Their order is not that of names.
A = {f"t{19 - i}": (0.05 * i, 0.3) for i in range(20)}
B = {task: (first - 0.4 if i % 3 else first, 0.25) for i, (task, (first, _)) in enumerate(A.items())}
MEANS = [{task: sum(rewards) / 2 for task, rewards in side.items()} for side in (A, B)]


@pytest.fixture(scope="module")
def versus() -> dict[str, Any]:
    """What `eval` says of B against A."""
    rows = [
        EvalRow(name, [RolloutResult("r", task, 0, None, reward) for task, own in side.items() for reward in own])
        for name, side in (("0", A), ("1", B))
    ]
    return dict(report(rows, {})["rows"][1]["versus"])


def test_policy_compare_an_evaluation_and_optimize_have_the_numbers_of_eval(versus: dict[str, Any]) -> None:
    means = [
        TaskMean(version, "eval", task, mean, 2, mean * mean, 2)
        for version, side in enumerate(MEANS)
        for task, mean in side.items()
    ]
    route = compared(means, 0, 1, None)  # evaluations between steps ask this route
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


def test_promotion_weighs_a_drop_by_the_same_differences(versus: dict[str, Any]) -> None:
    gate = pytest.importorskip("lightning_proxy.features.promotion.proxy")
    promotions = pytest.importorskip("lightning_proxy.features.promotion.promotions")
    low = min(0.0, *(reward for own in B.values() for reward in own))
    settings: dict[str, Any] = {
        "policy": {"publish": "lora"}, "trainer": {"group_size": 4},
        "promotion": {"mode": "gated", "metrics": {"reward": 0.1}, "reward_range": [low, 1.0]},
    }  # fmt: skip
    observed = [
        promotions.Observed(
            rollout_id=f"{task}-{place}", task_id=task, opened_by="", place=place, version=version, status="completed",
            created_at=10.0, ended_at=20.0, alone=True, rewards=(Reward("r", reward, created_at=21.0),),
            tool_errors=0.0, truncated=0.0, unrewarded=0.0, answer_tokens=1.0, latency=1.0,
        )
        for task in A
        for place, (version, reward) in enumerate((v, r) for v, side in ((1, A), (2, B)) for r in side[task])
    ]  # fmt: skip
    test = promotions.Promotion(1, version=2, against=1, status="testing", began_at=0.0)
    weighed = gate.weigh(test, observed, Config.model_validate(settings), 1000.0)
    (numbers,) = weighed.evidence["metrics"].values()
    engine = evidence_of((difference(B[task], A[task], low, 1.0) for task in A), 0.1, 0.05)
    assert (numbers["e_drop"], numbers["e_safe"]) == pytest.approx((engine.e_drop, engine.e_safe))
    assert numbers["difference"] * (1.0 - low) == pytest.approx(versus["difference"])
