"""A step's numbers, as trackers get them."""

from __future__ import annotations

from lightning_proxy.trainer.report.metric_schema import by_tag


def test_trackers_get_numbers_only_in_their_groups() -> None:
    metrics = {"loss": 0.5, "reward_by_task": {"t1": {"mean": 1.0}}, "of_a_newer_release": 1}
    assert by_tag(metrics) == {"optimizer/loss": 0.5, "of_a_newer_release": 1}
