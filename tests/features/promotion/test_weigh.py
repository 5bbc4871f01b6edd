"""Rollouts are split over both versions, become pairs, pairs evidence, and evidence a decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import Reward
from lightning_proxy.features.promotion import proxy as gate
from lightning_proxy.features.promotion.promotions import Observed, Promotion, choose
from lightning_proxy.features.promotion.proxy import Weighed, weigh

TEST = Promotion(1, version=2, against=1, status="testing", began_at=0.0)
NOW = 1_000.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "REWARD_WAIT_S", 100.0)


@pytest.mark.parametrize("group_size", [2, 7, 8])
@pytest.mark.parametrize("task", ["t1", "t2", None])
def test_siblings_are_split_evenly_whoever_comes_first(task: str | None, group_size: int) -> None:
    size = 2 if task is None else group_size
    found = [choose(TEST, task, place, group_size, 0.5) for place in range(20 * size)]
    for start in range(0, len(found), size):
        own = found[start : start + size]
        assert abs(own.count(1) - own.count(2)) == size % 2
    assert set(found[::size]) == {1, 2}, "which version comes first is drawn"


def test_a_place_has_the_same_side_in_every_process() -> None:
    """Proxies on one store draw for the places of one task."""
    sides = "".join(str(choose(TEST, "t1", place, 4, 0.5)) for place in range(16))
    assert sides == "1212122112211221"


def test_a_smaller_share_compares_fewer_groups_but_whole_ones() -> None:
    found = [[choose(TEST, f"t{i}", place, 4, 0.1) for place in range(4)] for i in range(500)]
    compared = [group for group in found if None not in group]
    assert 70 <= len(compared) <= 130
    assert all(sorted(map(str, group)) in (["1", "1", "2", "2"], ["None"] * 4) for group in found)


def rules(margins: Any = None, size: int = 4, **changed: Any) -> Config:
    section = {"mode": "gated", "max_rollouts": 1000, "metrics": margins or {"reward": 0.1}}
    weights = changed.pop("reward_weights", {"reward": 1.0})
    trainer = {"group_size": size, "group_timeout_s": 50.0, "reward_weights": weights}
    return Config.model_validate({"policy": {"publish": "lora"}, "promotion": section | changed, "trainer": trainer})


def seen(task: str | None, place: int, reward: float | None, size: int = 4, **changed: Any) -> Observed:
    """A rollout that ended at 20 with this reward."""
    name, rewards = f"{task}-{place}", () if reward is None else (Reward("r", reward, created_at=21.0),)
    told: Any = {
        "rollout_id": name, "task_id": task, "opened_by": "", "place": place, "alone": True, "rewards": rewards,
        "version": choose(TEST, task, place, size, 0.5), "status": "completed", "created_at": 10.0, "ended_at": 20.0,
        "tool_errors": 0.0, "truncated": 0.0, "unrewarded": 0.0, "answer_tokens": 10.0, "latency": 5.0,
    }  # fmt: skip
    return Observed(**told | changed)


def groups(count: int, candidate: float, live: float, **changed: Any) -> list[Observed]:
    """Whole groups in which each version has one reward. `changed`: of the candidate's."""
    found = []
    for task, place in ((f"t{i}", place) for i in range(count) for place in range(4)):
        is_candidate = choose(TEST, task, place, 4, 0.5) == 2
        found.append(seen(task, place, candidate if is_candidate else live, **(changed if is_candidate else {})))
    return found


def reward(weighed: Weighed) -> Any:
    return weighed.evidence["metrics"]["reward"]


def test_a_group_is_one_pair_whatever_its_siblings_are() -> None:
    weighed = weigh(TEST, groups(7, 0.6, 0.5), rules(), NOW)
    assert (weighed.outcome, reward(weighed)["pairs"], weighed.evidence["groups"]) == (None, 7, 7)
    assert reward(weighed)["difference"] == pytest.approx(0.1)
    assert (reward(weighed)["candidate"], reward(weighed)["live"]) == (pytest.approx(0.6), pytest.approx(0.5))


def test_a_candidate_that_is_no_worse_goes_live_and_one_that_is_worse_is_taken_back() -> None:
    weighed = weigh(TEST, groups(120, 0.5, 0.5), rules(), NOW)
    assert weighed.outcome == "promoted" and "a drop of 0.1 is excluded" in weighed.reason
    weighed = weigh(TEST, groups(40, 0.2, 0.6), rules(), NOW)
    assert weighed.outcome == "rejected"
    assert weighed.reason.startswith("reward is worse: -0.400 on average over 40 pairs")


@pytest.mark.parametrize(("candidate", "outcome"), [(0.5, "promoted"), (0.46, "promoted"), (0.44, "rejected")])
def test_what_is_undecided_after_the_last_rollout_goes_live_within_half_a_margin(
    candidate: float, outcome: str
) -> None:
    few = groups(5, candidate, 0.5)
    assert weigh(TEST, few, rules(max_rollouts=21), NOW).outcome is None
    weighed = weigh(TEST, few, rules(max_rollouts=20), NOW)
    assert weighed.outcome == outcome
    assert weighed.reason.startswith("undecided at max_rollouts, ")
    assert weighed.reason.endswith(f" reward: {candidate - 0.5:+.3f} on average over 5 pairs")
    still_running = [*few[:-1], seen("t4", 3, None, status="running", ended_at=None, created_at=20.0)]
    assert weigh(TEST, still_running, rules(max_rollouts=20), 30.0).outcome is None


def test_a_metric_that_no_rollout_has_a_value_of_lets_nothing_go_live() -> None:
    weighed = weigh(TEST, groups(5, 1.0, 0.5), rules({"reward": 0.1, "style": 0.1}, max_rollouts=20), NOW)
    assert weighed.outcome == "rejected"
    assert weighed.reason.endswith("with no value or a drop over half the margin: style: no pair has a value")


def test_a_failed_rollout_has_the_lowest_reward() -> None:
    weighed = weigh(TEST, groups(40, 1.0, 0.5, status="failed"), rules(), NOW)
    assert (weighed.outcome, reward(weighed)["candidate"]) == ("rejected", 0.0)
    assert weighed.evidence["candidate"]["failed"] == 80


WHOLE = groups(3, 0.5, 0.5)
NOT_REWARDED, RUNNING = seen("t1", 0, None), seen("t2", 3, None, status="running", ended_at=None)


@pytest.mark.parametrize(
    ("rollouts", "before", "counted", "at"),
    [
        ([*WHOLE[:4], NOT_REWARDED, *WHOLE[5:]], 119.0, 1, 120.0),  # the group after it has all of its own
        ([*WHOLE[:-1], seen("t2", 3, None)], 119.0, 2, 120.0),
        ([*WHOLE[:-1], RUNNING], 109.0, 2, 110.0),
        (WHOLE[:-1], 59.0, 2, 60.0),  # the sibling that is missing is waited for as long as the trainer does
    ],
)
def test_groups_count_in_the_order_in_which_they_began_and_nothing_is_waited_for_longer_than_its_timeout(
    rollouts: list[Observed], before: float, counted: int, at: float
) -> None:
    assert weigh(TEST, rollouts, rules(), before).evidence["groups"] == counted
    weighed = weigh(TEST, rollouts, rules(), at)
    assert (weighed.evidence["groups"], reward(weighed)["pairs"]) == (3, 3)


def test_a_sibling_that_comes_when_its_group_has_counted_changes_nothing() -> None:
    late = seen("t2", 3, None, status="running", created_at=70.0, ended_at=None)
    found = [reward(weigh(TEST, [*WHOLE[:-1], *more], rules(), NOW)) for more in ([], [late])]
    assert found[0] == found[1]


def test_rollouts_without_a_task_are_compared_in_pairs() -> None:
    lone = [seen(None, place, 1.0 if choose(TEST, None, place, 4, 0.5) == 2 else 0.5) for place in range(9)]
    weighed = weigh(TEST, lone, rules(), 30.0)
    assert (reward(weighed)["pairs"], reward(weighed)["difference"]) == (4, pytest.approx(0.5))


@pytest.mark.parametrize("why", [{"alone": False}, {"status": "discarded"}])
def test_what_another_model_answered_or_somebody_discarded_counts_for_neither(why: Any) -> None:
    weighed = weigh(TEST, groups(10, 0.0, 1.0, **why), rules(), NOW)
    assert (reward(weighed)["pairs"], reward(weighed)["candidate"], reward(weighed)["live"]) == (0, None, 1.0)


def test_rewards_beyond_the_range_count_as_its_ends() -> None:
    assert reward(weigh(TEST, groups(3, 5.0, 0.5), rules(), NOW))["difference"] == pytest.approx(0.5)


def test_the_newest_reward_of_each_name_counts_times_its_weight() -> None:
    posted = (Reward("r", 0.0, created_at=21.0), Reward("r", 1.0, created_at=22.0), Reward("r", 1.0, name="style"))
    one = [seen("t", place, None, 2, rewards=posted if place else (Reward("r", 0.0),)) for place in range(2)]
    told = rules(size=2, reward_range=[0, 2], reward_weights={"reward": 1.0, "style": 0.5})
    assert abs(reward(weigh(TEST, one, told, NOW))["difference"]) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("name", "value"),
    [("answer_tokens", 90.0), ("latency", 50.0), ("truncated", 1.0), ("unrewarded", 1.0), ("tool_errors", 0.9)],
)
def test_a_policy_that_games_its_reward_is_stopped_by_another_metric(name: str, value: float) -> None:
    better = groups(150, 0.9, 0.5, **{name: value})
    assert weigh(TEST, better, rules(), NOW).outcome == "promoted"
    weighed = weigh(TEST, better, rules({"reward": 0.1, name: 0.1}), NOW)
    assert weighed.outcome == "rejected"
    assert weighed.reason.startswith(f"{name} is worse")
    assert weighed.evidence["metrics"]["reward"]["verdict"] == "safe"


def test_a_policy_that_games_a_judge_is_stopped_by_what_people_say() -> None:
    told = [
        replace(one, rewards=(Reward("r", one.version - 1.0), Reward("r", 2.0 - one.version, name="human")))
        for one in groups(20, 0.0, 0.0)
    ]
    assert weigh(TEST, told, rules(), NOW).outcome == "promoted"
    weighed = weigh(TEST, told, rules({"reward": 0.1, "human": 0.1}), NOW)
    assert (weighed.outcome, weighed.reason[:23]) == ("rejected", "human is worse: -1.000 ")
