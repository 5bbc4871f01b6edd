"""CONTRACT.md, sections 2 to 5: rollouts become steps and versions, and new weights are verified before they count."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.model import GROUP, Agents, Faulty, ask, by_weights, learning, play, versions
from contract.system import Forked, Json, Proxy, ok, wait_until

LOADS = {"merged": "/collective_rpc", "lora": "/v1/load_lora_adapter"}  # where new weights are loaded
only_lora = pytest.mark.parametrize("proxy", ["lora"], indirect=True)


@pytest.fixture(params=["merged", "lora"])
def proxy(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Iterator[Proxy]:
    with learning(tmp_path, base, request.param) as one:
        yield one


def train(proxy: Proxy) -> Any:
    ok(proxy.run("train", "--once"))
    return proxy.get("/policy/steps")["data"][0]


def live(proxy: Proxy) -> int:
    return int(proxy.get("/policy")["live_version"])


def answering(proxy: Proxy, name: str = "next") -> str:
    """The version that answers a rollout."""
    return ask(proxy, name, "any", mode="eval").headers["x-policy-version"]


def steps_of(proxy: Proxy, names: list[str]) -> set[int | None]:
    return {proxy.rollout(name)["step"] for name in names}


def test_a_step_publishes_a_verified_version_that_answers_the_next_call(proxy: Proxy) -> None:
    before = ask(proxy, "before", "any", mode="eval").json["system_fingerprint"]
    done = proxy.run("train", "--once")
    assert done.returncode == 0 and "no step was taken: `lightning-proxy status` says what waits" in done.stderr
    assert proxy.get("/policy/steps")["data"] == []
    names = play(proxy, "first")
    evaluated = play(proxy, "held", mode="eval")
    ask(proxy, "unrewarded", "first-0")
    step = train(proxy)
    assert steps_of(proxy, names) == {1}
    assert steps_of(proxy, [*evaluated, "before", "unrewarded"]) == {None}
    assert (step["step"], step["base"], step["version"], step["metrics"]["rollouts_trained"]) == (1, 0, 1, 8)
    assert len(proxy.get("/policy/steps")["data"]) == 1
    version = versions(proxy)[1]
    assert version | {"verified": True, "live": True, "step": 1, "parent": 0, "status": "live"} == version
    policy = proxy.get("/policy")
    served = "policy-v1" if policy["publish"] == "lora" else "base"
    assert (policy["live_version"], policy["served_model"], policy["steps"]) == (1, served, 1)
    answer = ask(proxy, "next", "any", mode="eval")
    assert answer.headers["x-policy-version"] == "1" and answer.json["system_fingerprint"] != before
    status = proxy.run("status", "--json").json
    assert status["verified"]["deviations"] == step["metrics"]["verify_deviations"] > 3


@only_lora
def test_a_late_reward_offers_the_group_again_only_where_it_asks_for_it(proxy: Proxy) -> None:
    names = play(proxy, "first")
    train(proxy)
    late = {"rollout_id": names[0], "reward": 0.9}
    assert proxy.post("/reward", late).status == 200
    train(proxy)
    assert (steps_of(proxy, names), proxy.rollout(names[0])["reward"]) == ({1}, 0.9)
    assert proxy.post("/reward", late | {"retrain": True}).status == 200
    train(proxy)
    assert steps_of(proxy, names[:GROUP]) == {2} and steps_of(proxy, names[GROUP:]) == {1}


@pytest.mark.feature("tune")
@only_lora
@pytest.mark.sqlite
def test_a_run_that_is_offline_learns_from_the_store_and_leaves_it_and_the_policy_alone(proxy: Proxy) -> None:
    names = play(proxy, "first")
    ok(Forked(proxy, "train", "--offline", "--epochs", "2").wait())
    assert steps_of(proxy, names) == {None} and proxy.get("/policy/steps")["data"] == []
    assert (live(proxy), [*versions(proxy)]) == (0, [0])
    train(proxy)
    assert steps_of(proxy, names) == {1}


def test_no_request_is_refused_or_lost_while_versions_go_live_and_each_names_its_weights(proxy: Proxy) -> None:
    names = [f"agent-{n}" for n in range(4)]
    with Agents(proxy, *names) as agents:
        for step in range(3):
            play(proxy, f"r{step}")
            train(proxy)
        assert proxy.post("/policy/promote", {"version": 1}).status == 200
        assert ask(proxy, "last", "any", mode="eval").status == 200
    calls = [call for name in names for call in proxy.rollout(name)["calls"]]
    assert agents.statuses == [200] * len(calls)
    weights = by_weights(proxy)
    assert {len(prints) for prints in weights.values()} == {1} and len(set.union(*weights.values())) == len(weights)
    if proxy.get("/policy")["publish"] == "lora":
        assert {call["policy_version"] for call in calls} == {0}, "pinned"
    assert answering(proxy) == "1"


def test_a_call_that_runs_while_a_version_goes_live_goes_on_and_names_the_versions_that_answered(proxy: Proxy) -> None:
    play(proxy, "first")
    vllm = proxy.vllm
    asked = len(vllm.requests)
    statuses: list[int] = []
    agent = threading.Thread(target=lambda: statuses.append(ask(proxy, "long", "any", mode="eval").status))

    vllm.held = held = threading.Event()
    agent.start()
    wait_until(lambda: len(vllm.requests) > asked, 30, "the call is under way")
    train(proxy)
    held.set()
    agent.join()
    (call,) = proxy.rollout("long")["calls"]
    answered = [0] if proxy.get("/policy")["publish"] == "lora" else [0, 1]
    assert (statuses, call["policy_versions"]) == ([200], answered)


@only_lora
def test_a_rollout_keeps_its_version_unless_it_is_not_pinned(proxy: Proxy, base: Path, tmp_path: Path) -> None:
    answering(proxy, "old")
    play(proxy, "first")
    train(proxy)
    assert [answering(proxy, name) for name in ("old", "new")] == ["0", "1"]
    assert [call["model"] for call in proxy.rollout("old")["calls"]] == ["base", "base"]
    (tmp_path / "free").mkdir()
    with learning(tmp_path / "free", base, "lora", pin_rollouts=False) as free:
        answering(free, "old")
        play(free, "first")
        train(free)
        assert answering(free, "old") == "1"


@pytest.mark.parametrize("fault", Faulty, ids=[fault.name.lower() for fault in Faulty])
def test_weights_that_the_server_does_not_serve_are_taken_back(proxy: Proxy, fault: Faulty) -> None:
    play(proxy, "first")
    vllm = proxy.vllm
    vllm.fault = fault
    done = proxy.run("train", "--once")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    vllm.fault = None
    assert live(proxy) == 0
    failed = versions(proxy)[1]
    assert (failed["status"], failed["verified"]) == ("failed", False) and failed["error"]
    assert answering(proxy) == "0"
    assert proxy.post("/policy/promote", {"version": 1}).status == 409
    play(proxy, "second")
    train(proxy)
    assert live(proxy) > 1 and versions(proxy)[live(proxy)]["verified"]


@pytest.mark.parametrize(("fault", "tolerance"), [(Faulty.STALE, 100.0), (Faulty.HALF, None)])
def test_what_came_from_weights_that_are_taken_back_is_never_trained_on(
    base: Path, tmp_path: Path, fault: Faulty, tolerance: float | None
) -> None:
    """Answers tell new weights from old ones also where the tolerance does not."""
    with learning(tmp_path, base, "merged", verify_tolerance=tolerance) as proxy:
        play(proxy, "first")
        proxy.vllm.fault = fault
        trainer = Forked(proxy, "train")
        wait_until(lambda: live(proxy) == 1, 60, "version 1 is live")
        play(proxy, "second", tasks=4)
        done = trainer.wait()
        proxy.vllm.fault = None
        answered = [one["rollout_id"] for one in proxy.get("/rollouts")["data"] if one["policy_version"] == 1]
        assert done.returncode == 1 and "second-0-0" in done.stderr and "second-0-0" in answered
        assert (live(proxy), versions(proxy)[1]["status"]) == (0, "failed")
        play(proxy, "third")
        train(proxy)
        assert live(proxy) > 1 and versions(proxy)[live(proxy)]["verified"]
        found = [proxy.rollout(name) for name in answered]
        assert {one["step"] for one in found} == {None} and all("verified" in one["dropped"] for one in found)


def test_a_server_that_fails_or_is_away_is_waited_for_unless_the_trainer_is_stopped(proxy: Proxy) -> None:
    play(proxy, "first")
    proxy.vllm.refuses[load := LOADS[proxy.get("/policy")["publish"]]] = 500
    trainer = Forked(proxy, "train", "--once")
    wait_until(lambda: "is tried again (1 of 9)" in trainer.log.read_text(), 60, "it is to try again")
    del proxy.vllm.refuses[load]
    assert trainer.wait().returncode == 0
    assert (live(proxy), [*versions(proxy)]) == (1, [0, 1]), "no version is left over"
    names = play(proxy, "second")
    proxy.vllm.is_away = True
    trainer = Forked(proxy, "train", "--once")
    wait_until(lambda: "waits" in trainer.log.read_text(), 60, "it waits for the server")
    trainer.signal(signal.SIGTERM)
    assert trainer.wait().returncode == 0
    assert not any(version["verified"] for number, version in versions(proxy).items() if number > 1)
    proxy.vllm.is_away = False
    train(proxy)
    version = versions(proxy)[live(proxy)]
    assert (version["step"], version["verified"], steps_of(proxy, names)) == (2, True, {2})


def test_a_server_whose_log_probabilities_are_not_those_of_its_answers_publishes_nothing(proxy: Proxy) -> None:
    hot: Json = {"tokens": 40, "temperature": 0.6}
    play(proxy, "right", **hot)
    assert train(proxy)["metrics"]["sampler_difference"] < 1e-3
    before = live(proxy)
    proxy.vllm.processed_logprobs = False
    play(proxy, "wrong", **hot)
    done = Forked(proxy, "train", "--once").wait()
    assert done.returncode == 0 and "warning: sampler" in done.stderr
    assert "wrong sampler" in " ".join(proxy.run("status").stdout.split())
    step = proxy.get("/policy/steps")["data"][0]
    assert (step["metrics"]["skipped"], step["version"], live(proxy)) == (1, None, before)
    proxy.vllm.processed_logprobs = True
    play(proxy, "mended", **hot)
    train(proxy)
    assert live(proxy) > before


def test_a_version_is_made_live_by_hand_and_training_goes_on_from_it(proxy: Proxy) -> None:
    for step in range(2):
        play(proxy, f"r{step}")
        train(proxy)
    said = proxy.run("policy", "promote", "1")
    assert (said.returncode, said.stdout) == (0, "policy version 1 is live\n")
    assert (live(proxy), proxy.run("policy", "rollback").stdout) == (1, "policy version 0 is live\n")
    assert (live(proxy), answering(proxy)) == (0, "0")
    assert proxy.run("policy", "rollback").returncode != 0
    posts = ("promote", 2), ("rollback", 0), ("rollback", 0), ("rollback", 0), ("promote", 9), ("promote", 1)
    answers = [proxy.post(f"/policy/{do}", {"version": number} if number else None) for do, number in posts]
    assert [answer.status for answer in answers] == [200, 200, 200, 409, 404, 200]
    assert [answer.json["version"] for answer in answers[:3]] == [2, 1, 0] and answers[5].json["live"] is True
    assert {len(prints) for prints in by_weights(proxy).values()} == {1}
    assert [" yes " in line for line in proxy.run("policy", "list").stdout.splitlines()[1:4]] == [False, True, True]
    listed = proxy.run("policy", "list", "--json").json["data"]
    assert [(one["version"], one["live"]) for one in listed] == [(0, False), (1, True), (2, False)]
    play(proxy, "after")
    step_ = train(proxy)
    assert (step_["step"], step_["base"], step_["version"], versions(proxy)[3]["parent"]) == (3, 1, 3, 1)


def test_a_version_that_cannot_be_served_is_not_made_live(proxy: Proxy) -> None:
    play(proxy, "first")
    train(proxy)
    assert proxy.post("/policy/rollback").json["version"] == 0
    vllm = proxy.vllm
    vllm.restart()
    vllm.refuses[load := LOADS[proxy.get("/policy")["publish"]]] = 400
    assert proxy.post("/policy/promote", {"version": 1}).status == 502
    del vllm.refuses[load]
    shutil.rmtree(versions(proxy)[1]["path"])
    answer = proxy.post("/policy/promote", {"version": 1})
    assert answer.status == 404 and "the files of policy version 1 are gone" in answer.error["message"]
    said = proxy.run("policy", "promote", "1")
    assert said.returncode == 1 and "are gone" in said.stderr and "Traceback" not in said.stderr
    assert live(proxy) == 0
    wait_until(lambda: answering(proxy) == "0", 30, "0 answers")


def test_a_server_that_restarted_serves_the_live_version_again(proxy: Proxy) -> None:
    play(proxy, "first")
    train(proxy)
    weights = ask(proxy, "before", "any", mode="eval").json["system_fingerprint"]
    proxy.vllm.restart()

    def serves_it() -> bool:
        answer = ask(proxy, "after", "any", mode="eval")
        return answer.status == 200 and answer.json["system_fingerprint"] == weights

    wait_until(serves_it, 30, "the weights are there again")
    proxy.vllm.paused = proxy.get("/policy")["publish"] == "merged"
    wait_until(lambda: not proxy.vllm.paused, 30, "a server left frozen goes on")
