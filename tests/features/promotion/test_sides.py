"""Which version answers which rollout of a test."""

from __future__ import annotations

import pytest

from lightning_proxy.features.promotion.promotions import Assigned, Promotion
from lightning_proxy.features.promotion.splitting import choose

TEST = Promotion(3, version=8, against=5, status="testing", began_at=0.0)


def assigned(task: str | None, rollouts: int, *, group_size: int = 8, share: float = 0.5) -> list[Assigned]:
    return [choose(TEST, task, place, group_size, share) for place in range(rollouts)]


@pytest.mark.parametrize("group_size", [2, 4, 7, 8])
@pytest.mark.parametrize("task", ["t1", "t2", None])
def test_siblings_are_split_evenly_whoever_comes_first(task: str | None, group_size: int) -> None:
    size = 2 if task is None else group_size
    found = [one.version for one in assigned(task, 20 * size, group_size=group_size)]
    for group in range(20):
        own = found[group * size : (group + 1) * size]
        assert abs(own.count(8) - own.count(5)) == size % 2
    assert set(found[::size]) == {5, 8}, "which version comes first is drawn"


def test_the_same_rollout_has_the_same_version_in_every_process() -> None:
    assert assigned("t", 100) == assigned("t", 100)
    assert [one.place for one in assigned("t", 100)] == list(range(100))


def test_a_smaller_share_compares_fewer_groups_but_whole_ones() -> None:
    found = [assigned(f"t{i}", 4, group_size=4, share=0.1) for i in range(500)]
    compared = [group for group in found if group[0].compared]
    assert 70 <= len(compared) <= 130
    for group in found:
        assert len({one.compared for one in group}) == 1
        assert sorted(one.version for one in group) == ([5, 5, 8, 8] if group[0].compared else [5] * 4)
