"""What `eval` says of a drop between two rows."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.commands.eval.stats import comparison_line, same_version, weigh


def tasks(differences: list[float], live: float = 0.5) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Two rollouts a task, which are so much above two of the first row on average."""
    ours = {f"t{i}": [live + value, live + value] for i, value in enumerate(differences)}
    return ours, {task: [0.0, 2 * live] for task in ours}


def line(evidence: dict[str, Any], same: int | None = None) -> str:
    return comparison_line({"model": "5", "versus": {"evidence": evidence, "same_version": same}}, "live")


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([-0.5] * 20, "5 beside live: a drop is shown"),
        ([0.0] * 80, "5 beside live: a drop of more than 0.1 is excluded"),
        ([-0.06] * 200, "5 beside live: a drop is shown, and one of more than 0.1 is excluded"),
        ([0.1], "5 beside live: a drop of more than 0.1 is not excluded yet (evidence 1.1, 20 are needed)"),
    ],
)
def test_one_line_says_whether_there_is_a_drop(differences: list[float], expected: str) -> None:
    assert line(weigh(*tasks(differences))) == expected


def test_a_task_counts_once_and_in_any_order() -> None:
    ours, first = tasks([-0.5, 0.25, 0.0, 0.5])
    again = {task: rewards * 4 for task, rewards in reversed(ours.items())}
    assert weigh(again, first) == pytest.approx(weigh(ours, first))


def test_rewards_beyond_1_widen_the_range_and_the_margin() -> None:
    ours, first = tasks([0.0] * 80, live=2.0)
    assert line(weigh(ours, first)) == "5 beside live: a drop of more than 0.4 is excluded"
    assert weigh({"t": [-1.0]}, {"t": [1.0]})["margin"] == pytest.approx(0.2)
    assert weigh({"t": [-1.5e308]}, {"t": [1.5e308]})["margin"] == pytest.approx(3e307)


def test_rows_of_one_version_differ_by_chance() -> None:
    row, other = {"policy_versions": [3]}, {"policy_versions": [None, 3]}
    assert (same_version(row, row), same_version(other, other)) == (3, 3)
    for versions in ([4], [3, 4], [None], []):
        assert same_version({"policy_versions": versions}, row) is None
    assert same_version(other, row) is same_version({"policy_versions": [None]}, {"policy_versions": [None]}) is None
    assert line({}, same=3) == "5 beside live: both are policy version 3, so any difference is chance"
