"""CONTRACT.md, sections 2 to 5: rollouts become steps and versions, and new weights are verified before they count."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.model import GROUP, TRAINER, Faulty, ModelVllm, ask, by_weights, play, versions
from contract.system import Forked, Json, Proxy, in_this_process, wait_until
from support.models import save_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(params=["merged", "lora"])
def proxy(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Proxy]:
    policy = {"model": str(model), "publish": request.param}
    with in_this_process(tmp_path, ModelVllm(model), policy=policy, trainer=TRAINER) as one:
        yield one


only_merged = pytest.mark.parametrize("proxy", ["merged"], indirect=True)
only_lora = pytest.mark.parametrize("proxy", ["lora"], indirect=True)


def vllm_of(proxy: Proxy) -> ModelVllm:
    assert isinstance(proxy.vllm, ModelVllm)
    return proxy.vllm


def train(proxy: Proxy) -> Json:
    """Train on what waits; returns the newest step."""
    done = proxy.run("train", "--once")
    assert done.returncode == 0, done.stderr
    return newest(proxy)


def newest(proxy: Proxy) -> Json:
    found: Json = proxy.get("/policy/steps?limit=1")["data"][0]
    return found


def live(proxy: Proxy) -> int:
    return int(proxy.get("/policy")["live_version"])


def load_path(proxy: Proxy) -> str:
    """Where the server is told to load new weights."""
    return "/collective_rpc" if proxy.get("/policy")["publish"] == "merged" else "/v1/load_lora_adapter"


def steps_of(proxy: Proxy, names: list[str]) -> set[int | None]:
    return {proxy.rollout(name)["step"] for name in names}


# A step ---------------------------------------------------------------------------------------------------------------


def test_a_step_publishes_a_verified_version_that_answers_the_next_call(proxy: Proxy) -> None:
    before = ask(proxy, "before", "any", mode="eval").json["system_fingerprint"]
    names = play(proxy, "first")
    evaluated = play(proxy, "held", mode="eval")
    ask(proxy, "unrewarded", "first-0")
    step = train(proxy)
    assert steps_of(proxy, names) == {1}
    assert steps_of(proxy, [*evaluated, "before", "unrewarded"]) == {None}
    assert (step["step"], step["base"], step["version"], step["metrics"]["rollouts_trained"]) == (1, 0, 1, 8)
    assert len(proxy.get("/policy/steps")["data"]) == 1
    version = versions(proxy)[1]
    assert {key: version[key] for key in ("verified", "live", "step", "parent", "status")} == {
        "verified": True, "live": True, "step": 1, "parent": 0, "status": "live",
    }  # fmt: skip
    policy = proxy.get("/policy")
    served = "policy-v1" if policy["publish"] == "lora" else "base"
    assert (policy["live_version"], policy["served_model"], policy["steps"]) == (1, served, 1)
    answer = ask(proxy, "next", "any", mode="eval")
    assert answer.headers["x-policy-version"] == "1" and answer.json["system_fingerprint"] != before
    status = proxy.run("status", "--json").json
    assert status["verified"]["deviations"] == step["metrics"]["verify_deviations"] > 3


def test_once_says_when_there_was_nothing_to_learn_from(proxy: Proxy) -> None:
    done = proxy.run("train", "--once")
    assert done.returncode == 0 and "no step was taken: `lightning-proxy status` says what waits" in done.stderr
    assert proxy.get("/policy/steps")["data"] == []


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
    done = Forked(proxy, "train", "--offline", "--epochs", "2").wait()
    assert done.returncode == 0, done.stderr
    assert steps_of(proxy, names) == {None} and proxy.get("/policy/steps")["data"] == []
    assert (live(proxy), [*versions(proxy)]) == (0, [0])
    train(proxy)
    assert steps_of(proxy, names) == {1}


# Swapping -------------------------------------------------------------------------------------------------------------


class Agents:
    """Agents that ask without a pause, each in a rollout of its own, in a block."""

    def __init__(self, proxy: Proxy, count: int = 4) -> None:
        self.proxy, self.stopped, self.statuses = proxy, threading.Event(), list[int]()
        self.threads = [threading.Thread(target=self.work, args=[f"agent-{n}"]) for n in range(count)]

    def work(self, name: str) -> None:
        while not self.stopped.is_set():
            self.statuses.append(ask(self.proxy, name, name, mode="eval").status)

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def test_no_request_is_refused_or_lost_while_versions_go_live_and_each_names_its_weights(proxy: Proxy) -> None:
    agents = Agents(proxy)
    with agents:
        for step in range(3):
            play(proxy, f"r{step}")
            train(proxy)
        assert proxy.post("/policy/promote", {"version": 1}).status == 200
        assert ask(proxy, "last", "any", mode="eval").status == 200
    assert set(agents.statuses) == {200}
    calls = [call for n in range(4) for call in proxy.rollout(f"agent-{n}")["calls"]]
    assert len(calls) == len(agents.statuses)
    weights = by_weights(proxy)
    assert {len(prints) for prints in weights.values()} == {1} and len(set.union(*weights.values())) == len(weights)
    if proxy.get("/policy")["publish"] == "lora":
        for n in range(4):
            assert {call["policy_version"] for call in proxy.rollout(f"agent-{n}")["calls"]} == {0}, "pinned"
    assert ask(proxy, "later", "any", mode="eval").headers["x-policy-version"] == "1"


@only_merged
def test_a_call_that_runs_while_weights_are_replaced_goes_on_and_names_both_versions(proxy: Proxy) -> None:
    play(proxy, "first")
    vllm = vllm_of(proxy)
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
    assert (statuses, call["policy_versions"]) == ([200], [0, 1])


@only_lora
def test_a_rollout_keeps_the_version_that_it_began_with_unless_it_is_not_pinned(
    proxy: Proxy, model: Path, tmp_path: Path
) -> None:
    ask(proxy, "old", "any", mode="eval")
    play(proxy, "first")
    train(proxy)
    assert [ask(proxy, name, "any", mode="eval").headers["x-policy-version"] for name in ("old", "new")] == ["0", "1"]
    assert [call["model"] for call in proxy.rollout("old")["calls"]] == ["base", "base"]
    (tmp_path / "free").mkdir()
    policy = {"model": str(model), "publish": "lora", "pin_rollouts": False}
    with in_this_process(tmp_path / "free", ModelVllm(model), policy=policy, trainer=TRAINER) as free:
        ask(free, "old", "any", mode="eval")
        play(free, "first")
        train(free)
        assert ask(free, "old", "any", mode="eval").headers["x-policy-version"] == "1"


# Verified -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", Faulty, ids=[fault.name.lower() for fault in Faulty])
def test_weights_that_the_server_does_not_serve_do_not_stay_live_and_the_next_ones_may(
    proxy: Proxy, fault: Faulty
) -> None:
    play(proxy, "first")
    vllm = vllm_of(proxy)
    vllm.fault = fault
    done = proxy.run("train", "--once")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    vllm.fault = None
    assert live(proxy) == 0
    failed = versions(proxy)[1]
    assert (failed["status"], failed["verified"]) == ("failed", False) and failed["error"]
    assert ask(proxy, "next", "any", mode="eval").headers["x-policy-version"] == "0"
    assert proxy.post("/policy/promote", {"version": 1}).status == 409
    play(proxy, "second")
    train(proxy)
    assert live(proxy) > 1 and versions(proxy)[live(proxy)]["verified"]


@pytest.mark.parametrize(("fault", "tolerance"), [(Faulty.STALE, 100.0), (Faulty.HALF, None)])
def test_what_agents_got_from_weights_that_are_taken_back_is_named_and_never_trained_on(
    model: Path, tmp_path: Path, fault: Faulty, tolerance: float | None
) -> None:
    """Answers tell new weights from old ones also where the tolerance does not."""
    policy = {"model": str(model), "publish": "merged", "verify_tolerance": tolerance}
    with in_this_process(tmp_path, ModelVllm(model), policy=policy, trainer=TRAINER) as proxy:
        play(proxy, "first")
        vllm_of(proxy).fault = fault
        trainer = Forked(proxy, "train")
        wait_until(lambda: live(proxy) == 1, 60, "version 1 is live")
        play(proxy, "second", tasks=4)
        done = trainer.wait()
        vllm_of(proxy).fault = None
        answered = [one["rollout_id"] for one in proxy.get("/rollouts")["data"] if one["policy_version"] == 1]
        assert done.returncode == 1 and "second-0-0" in done.stderr and "second-0-0" in answered
        assert (live(proxy), versions(proxy)[1]["status"]) == (0, "failed")
        play(proxy, "third")
        train(proxy)
        assert live(proxy) > 1 and versions(proxy)[live(proxy)]["verified"]
        found = [proxy.rollout(name) for name in answered]
        assert {one["step"] for one in found} == {None} and all("verified" in one["dropped"] for one in found)


def test_a_stopped_trainer_waits_for_no_server_and_the_next_one_publishes_what_it_trained(proxy: Proxy) -> None:
    names = play(proxy, "first")
    vllm = vllm_of(proxy)
    vllm.is_away = True
    trainer = Forked(proxy, "train", "--once")
    wait_until(lambda: "waits" in trainer.log.read_text(), 60, "it waits for the server")
    trainer.signal(signal.SIGTERM)
    assert trainer.wait().returncode == 0
    assert not any(version["verified"] for version in versions(proxy).values() if version["version"])
    vllm.is_away = False
    train(proxy)
    version = versions(proxy)[live(proxy)]
    assert (version["step"], version["verified"], steps_of(proxy, names)) == (1, True, {1})


def test_a_server_that_fails_to_load_weights_is_asked_again_and_no_version_is_left_over(proxy: Proxy) -> None:
    play(proxy, "first")
    vllm_of(proxy).refuses[load := load_path(proxy)] = 500
    trainer = Forked(proxy, "train", "--once")
    wait_until(lambda: "is tried again (1 of 9)" in trainer.log.read_text(), 60, "it is to try again")
    del vllm_of(proxy).refuses[load]
    assert trainer.wait().returncode == 0
    assert (live(proxy), [*versions(proxy)]) == (1, [0, 1])


def test_a_server_whose_log_probabilities_are_not_those_of_its_answers_publishes_nothing(proxy: Proxy) -> None:
    hot: Json = {"tokens": 40, "temperature": 0.6}
    play(proxy, "right", **hot)
    assert train(proxy)["metrics"]["sampler_difference"] < 1e-3
    before = live(proxy)
    vllm_of(proxy).processed_logprobs = False
    play(proxy, "wrong", **hot)
    done = Forked(proxy, "train", "--once").wait()
    assert done.returncode == 0 and "warning: sampler" in done.stderr
    assert "wrong sampler" in " ".join(proxy.run("status").stdout.split())
    step = newest(proxy)
    assert (step["metrics"]["skipped"], step["version"], live(proxy)) == (1, None, before)
    vllm_of(proxy).processed_logprobs = True
    play(proxy, "mended", **hot)
    train(proxy)
    assert live(proxy) > before


# By hand --------------------------------------------------------------------------------------------------------------


def test_a_version_is_made_live_by_hand_and_training_goes_on_from_it(proxy: Proxy) -> None:
    for step in range(2):
        play(proxy, f"r{step}")
        train(proxy)
    said = proxy.run("policy", "promote", "1")
    assert (said.returncode, said.stdout) == (0, "policy version 1 is live\n")
    assert (live(proxy), proxy.run("policy", "rollback").stdout) == (1, "policy version 0 is live\n")
    assert (live(proxy), ask(proxy, "base", "any", mode="eval").headers["x-policy-version"]) == (0, "0")
    assert proxy.run("policy", "rollback").returncode != 0
    answers = [
        proxy.post("/policy/promote", {"version": 2}), proxy.post("/policy/rollback"),
        proxy.post("/policy/rollback"), proxy.post("/policy/rollback"),
        proxy.post("/policy/promote", {"version": 9}), proxy.post("/policy/promote", {"version": 1}),
    ]  # fmt: skip
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
    vllm = vllm_of(proxy)
    vllm.restart()
    vllm.refuses[load := load_path(proxy)] = 400
    assert proxy.post("/policy/promote", {"version": 1}).status == 502
    del vllm.refuses[load]
    shutil.rmtree(versions(proxy)[1]["path"])
    answer = proxy.post("/policy/promote", {"version": 1})
    assert answer.status == 404 and "the files of policy version 1 are gone" in answer.error["message"]
    said = proxy.run("policy", "promote", "1")
    assert said.returncode == 1 and "are gone" in said.stderr and "Traceback" not in said.stderr
    assert live(proxy) == 0
    wait_until(lambda: ask(proxy, "next", "any", mode="eval").headers["x-policy-version"] == "0", 30, "0 answers")


def test_a_server_that_restarted_serves_the_live_version_again(proxy: Proxy) -> None:
    play(proxy, "first")
    train(proxy)
    weights = ask(proxy, "before", "any", mode="eval").json["system_fingerprint"]
    vllm_of(proxy).restart()

    def serves_it() -> bool:
        answer = ask(proxy, "after", "any", mode="eval")
        return answer.status == 200 and answer.json["system_fingerprint"] == weights

    wait_until(serves_it, 30, "the weights are there again")
    vllm_of(proxy).paused = proxy.get("/policy")["publish"] == "merged"
    wait_until(lambda: not vllm_of(proxy).paused, 30, "a server left frozen goes on")
