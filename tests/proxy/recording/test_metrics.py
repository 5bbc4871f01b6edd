"""What a step reports is what docs/metrics.md says."""

from __future__ import annotations

import pytest

from lightning_proxy.trainer.report.metric_schema import ALL_METRICS, by_tag, table
from support.paths import ROOT

DOCUMENT = ROOT / "docs" / "metrics.md"


@pytest.mark.parametrize("group", sorted({metric.group for metric in ALL_METRICS.values()}))
def test_the_document_lists_every_metric_with_its_unit_and_meaning(group: str) -> None:
    _, _, section = DOCUMENT.read_text().partition(f"\n## {group}\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert rows == table(group).splitlines()


def test_trackers_get_numbers_only_in_their_groups() -> None:
    metrics = {"loss": 0.5, "reward_by_task": {"t1": {"mean": 1.0}}, "of_a_newer_release": 1}
    assert by_tag(metrics) == {"optimizer/loss": 0.5, "of_a_newer_release": 1}
