"""CONTRACT.md, section 2: rewards."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from contract.system import Proxy, in_this_process

NUMBERS = itertools.count()


@pytest.fixture
def rollout(proxy: Proxy) -> str:
    """A running rollout of one call."""
    name = f"r{next(NUMBERS)}"
    assert proxy.chat(name).status == 200
    return name


def test_only_the_rollout_and_the_reward_are_required(proxy: Proxy, rollout: str) -> None:
    answer = proxy.post("/reward", {"rollout_id": rollout, "reward": 0.5})
    assert answer.status == 200
    assert answer.json == {"reward_id": answer.json["reward_id"], "rollout_id": rollout, "status": "recorded"}
    found = proxy.rollout(rollout)
    assert (found["status"], found["reward"]) == ("completed", 0.5)
    (reward,) = found["rewards"]
    assert {k: reward[k] for k in ("reward", "name", "source", "comment", "call_id")} == {
        "reward": 0.5, "name": "reward", "source": None, "comment": None, "call_id": None,
    }  # fmt: skip


def test_a_list_is_recorded_whole_or_not_at_all(proxy: Proxy, rollout: str) -> None:
    good, bad = {"rollout_id": rollout, "reward": 1, "final": False}, {"rollout_id": "nobody", "reward": 1}
    assert proxy.post("/reward", [good, bad]).status == 404
    assert proxy.rollout(rollout)["rewards"] == []
    answer = proxy.post("/reward", [good, good | {"name": "style"}])
    assert [one["status"] for one in answer.json] == ["recorded", "recorded"]
    assert [one["name"] for one in proxy.rollout(rollout)["rewards"]] == ["reward", "style"]
    assert proxy.post("/reward", [good] * 10_001).status == 413
    assert len(proxy.rollout(rollout)["rewards"]) == 2


def test_a_bad_reward_is_refused_by_name_and_leaves_nothing(proxy: Proxy, rollout: str) -> None:
    refused: list[tuple[dict[str, Any], int, str]] = [
        ({"reward": "1"}, 422, "reward"),
        ({"reward": True}, 422, "reward"),
        ({"reward": math.nan}, 422, "reward"),
        ({"reward": math.inf}, 422, "reward"),
        ({"reward": 10_001}, 422, "reward"),
        ({"reward": None}, 422, "reward"),
        ({"final": 1}, 422, "final"),
        ({"surprise": 1}, 422, "surprise"),
        ({"rollout_id": "a b"}, 422, "rollout_id"),
        ({"rollout_id": "nobody"}, 404, "rollout_id"),
        ({"call_id": "nobody"}, 404, "call_id"),
    ]
    for wrong, status, param in refused:
        answer = proxy.post("/reward", {"rollout_id": rollout, "reward": 1} | wrong)
        assert (answer.status, answer.error["param"].split(".")[-1]) == (status, param)
        assert answer.error["message"]
        found = proxy.rollout(rollout)
        assert (found["rewards"], found["status"]) == ([], "running"), wrong


def test_the_newest_value_counts_also_a_late_one_and_the_history_stays(proxy: Proxy, rollout: str) -> None:
    assert proxy.post(f"/rollouts/{rollout}/end", {"status": "completed"}).status == 200
    for value in (0.1, 0.9):
        assert proxy.post("/reward", {"rollout_id": rollout, "reward": value}).status == 200
    found = proxy.rollout(rollout)
    assert (found["reward"], [one["reward"] for one in found["rewards"]]) == (0.9, [0.1, 0.9])


def test_a_reward_of_a_call_leaves_the_rollout_running(proxy: Proxy, rollout: str) -> None:
    (call,) = proxy.rollout(rollout)["calls"]
    proxy.post("/reward", {"rollout_id": rollout, "reward": 0.3, "call_id": call["call_id"]})
    found = proxy.rollout(rollout)
    assert (found["status"], found["reward"], found["calls"][0]["reward"]) == ("running", 0.3, 0.3)
    proxy.post("/reward", {"rollout_id": rollout, "reward": 0.4, "call_id": call["call_id"], "final": True})
    assert proxy.rollout(rollout)["status"] == "completed"


def test_a_rollouts_own_reward_counts_before_its_calls(proxy: Proxy, rollout: str) -> None:
    (call,) = proxy.rollout(rollout)["calls"]
    proxy.post("/reward", {"rollout_id": rollout, "reward": 0.3, "call_id": call["call_id"]})
    proxy.post("/reward", {"rollout_id": rollout, "reward": 0.8})
    assert proxy.rollout(rollout)["reward"] == 0.8
    (listed,) = [one for one in proxy.get("/rollouts?limit=1000")["data"] if one["rollout_id"] == rollout]
    assert listed["reward"] == 0.8


def test_an_idempotency_key_makes_a_repeated_post_harmless(proxy: Proxy, rollout: str) -> None:
    body, key = {"rollout_id": rollout, "reward": 1}, rollout.ljust(200, "k")
    first = proxy.post("/reward", body, Idempotency_Key=key)
    again = proxy.post("/reward", body, Idempotency_Key=key)
    assert (again.status, again.json) == (200, first.json)
    assert proxy.post("/reward", body | {"reward": 0}, Idempotency_Key=key).status == 409
    assert len(proxy.rollout(rollout)["rewards"]) == 1
    refused = proxy.post("/reward", body, Idempotency_Key=f"{key}k")
    assert refused.status == 422 and "at most 200 characters" in refused.error["message"]


def test_named_rewards_make_one_return_by_their_weights(tmp_path: Path) -> None:
    trainer = {"reward_weights": {"right": 1.0, "short": 0.5}}
    with in_this_process(tmp_path, trainer=trainer) as proxy:
        proxy.chat("r1")
        for name, value in (("right", 1), ("short", 0.4), ("ignored", 9)):
            proxy.post("/reward", {"rollout_id": "r1", "reward": value, "name": name, "final": name == "ignored"})
        assert proxy.rollout("r1")["reward"] == pytest.approx(1.2)
        (listed,) = proxy.get("/rollouts")["data"]
        assert listed["reward"] == pytest.approx(1.2)
        assert proxy.run("rollouts", "show", "r1", "--json").json["reward"] == pytest.approx(1.2)


def test_the_range_of_rewards_can_be_set(tmp_path: Path) -> None:
    with in_this_process(tmp_path, rewards={"range": [-1, 2]}) as proxy:
        proxy.chat("r1")
        for wrong, param in (
            ([1e308], "0.reward"), ([-1.5], "0.reward"), ([1.0, 2.01], "1.reward"),
        ):  # fmt: skip
            answer = proxy.post("/reward", [{"rollout_id": "r1", "reward": value} for value in wrong])
            assert (answer.status, answer.error["param"]) == (422, param)
            assert answer.error["message"].endswith("is outside of rewards.range, -1 to 2")
        assert proxy.rollout("r1")["rewards"] == []
        ends = [{"rollout_id": "r1", "reward": reward} for reward in (-1, 2)]
        assert proxy.post("/reward", ends).status == 200


def test_an_idempotency_key_is_its_senders_own(proxy: Proxy) -> None:
    """Agents that count their posts all begin with the same key."""
    for opened in proxy.post("/rollouts", {"task_id": "t", "n": 2}).json:
        name, body = opened["rollout_id"], {"rollout_id": opened["rollout_id"], "reward": 1}
        for _ in range(2):
            assert proxy.post("/reward", body, opened["api_key"], Idempotency_Key="1").status == 200
        assert len(proxy.rollout(name)["rewards"]) == 1


def test_a_rollouts_own_key_offers_nothing_to_the_trainer_again(proxy: Proxy) -> None:
    (opened,) = proxy.post("/rollouts", {"task_id": "t"}).json
    reward = {"rollout_id": opened["rollout_id"], "reward": 1, "retrain": True}
    assert proxy.post("/reward", [reward | {"retrain": False}, reward], opened["api_key"]).status == 403
    found = proxy.rollout(opened["rollout_id"])
    assert (found["rewards"], found["status"]) == ([], "running")
    assert proxy.post("/reward", reward).status == 200
