"""CONTRACT.md, section 4: nothing acknowledged is lost, and a trainer that is killed goes on from there."""

from __future__ import annotations

import itertools
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.model import TRAINER, Agents, Faulty, ask, by_weights, learning, play, versions
from contract.system import Forked, Proxy, in_this_process, ok, served, wait_until

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
COMPLETIONS = "/v1/completions"
Kill = Callable[[Proxy, int], bool]


def work(url: str, name: str) -> list[Any]:
    """Call and reward until the proxy is gone; return what was received whole: rollout, call and reward."""
    received = list[Any]()
    with suppress(httpx.HTTPError), httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for turn in range(10_000):
            stream, rollout = turn % 2 == 0, f"{name}-{turn}"
            answer = client.post(f"/rollouts/{rollout}/v1/chat/completions", json=CHAT | {"stream": stream})
            assert answer.status_code == 200
            if not stream or answer.content.endswith(b"data: [DONE]\n\n"):
                received.append([rollout, answer.headers["x-call-id"], None])
                reward = client.post("/reward", json={"rollout_id": rollout, "reward": 1})
                received[-1][2] = reward.json()["reward_id"]
    return received


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_proxy_has_lost_no_answer_and_no_reward(tmp_path: Path, workers: int) -> None:
    received = list[Any]()
    with served(tmp_path, proxy={"workers": workers}) as proxy, ThreadPoolExecutor(8) as pool:
        for round_ in range(2):
            working = [pool.submit(work, proxy.url, f"a{round_}-{i}") for i in range(8)]
            time.sleep(0.5 + random.random())
            proxy.server.end(signal.SIGKILL)
            received += itertools.chain(*(agent.result() for agent in working))
            proxy.start()
        assert len(received) > 20
        for rollout, call_id, reward_id in received:
            found = proxy.rollout(rollout)
            (call,) = found["calls"]
            assert (call["call_id"], call["status"], bool(call["response"])) == (call_id, "ok", True)
            assert not reward_id or [one["reward_id"] for one in found["rewards"]] == [reward_id]
        assert {one["status"] for one in proxy.get("/rollouts?limit=1000")["data"]} <= {"running", "completed"}


def test_a_call_that_was_under_way_is_finished_by_a_stop_and_incomplete_after_a_kill(tmp_path: Path) -> None:
    with served(tmp_path) as proxy, ThreadPoolExecutor() as agents:
        for name, number in (("ok", signal.SIGTERM), ("incomplete", signal.SIGKILL)):
            proxy.vllm.delay_s = 1.0 if name == "ok" else 30
            proxy.vllm.requests.clear()
            asked = agents.submit(proxy.chat, name)
            wait_until(lambda: proxy.vllm.requests, 30, "the call is under way")
            code = proxy.server.end(number)
            if name == "ok":
                assert (code, asked.result().status) == (0, 200)
                assert "not written" not in proxy.server.log.read_text()
            else:
                assert isinstance(asked.exception(), httpx.HTTPError)
            proxy.start()
            (call,) = proxy.rollout(name)["calls"]
            assert (call["status"], call["trainable"]) == (name, name == "ok")


@pytest.mark.sqlite
def test_a_rollout_that_another_process_deletes_keeps_no_call_from_its_record(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy, ThreadPoolExecutor() as agents:
        proxy.chat("deleted")
        with closing(sqlite3.connect(tmp_path / "store.db")) as other:
            other.executescript("PRAGMA foreign_keys = ON; BEGIN IMMEDIATE; DELETE FROM rollouts")
            calls = [agents.submit(proxy.chat, "first")]
            time.sleep(0.3)  # now its record waits, and the other records will be one group behind it
            names = ["deleted", "second", "third"]
            calls += [agents.submit(proxy.chat, name) for name in names]
            time.sleep(0.3)
            other.commit()
        assert [call.result().status for call in calls] == [200] * 4
        assert [len(proxy.rollout(name)["calls"]) for name in ["first", *names]] == [1] * 4


@pytest.fixture(params=["merged", "lora"])
def proxy(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Iterator[Proxy]:
    trainer = TRAINER | {"keep_checkpoints": 2, "collapse": {"action": "off"}}
    with learning(tmp_path, base, request.param, trainer=trainer, keep_versions=2) as one:
        yield one


def before_a_change(proxy: Proxy, number: int) -> bool:
    """Let a trainer be killed before its nth change of a file; False if it makes fewer."""
    done = Forked(proxy, "train", "--once", killed_at=number).wait()
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == -signal.SIGKILL


def at_a_request(proxy: Proxy, number: int) -> bool:
    """Let a trainer be killed at its nth request to load, name or verify weights; False if it makes fewer."""
    return killed_when(proxy, lambda asked: len(asked) == number)


def killed_when(proxy: Proxy, due: Callable[[list[str]], bool]) -> bool:
    """Let a trainer be killed when it is `due` by what it asked the model's server for; False if it never is."""
    asked: list[str] = []
    trainer = Forked(proxy, "train", "--once")

    def before(path: str) -> None:
        if asked or path != COMPLETIONS:  # which the proxy asks for, too
            asked.append(path)
        if due(asked):
            trainer.signal(signal.SIGKILL)

    proxy.vllm.before = before
    done = trainer.wait()
    proxy.vllm.before = lambda path: None
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == -signal.SIGKILL


EACH = [pytest.mark.long, pytest.mark.xdist_group("each kill")]  # minutes, which other tests need not wait for


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kill", "every"), [
    pytest.param(before_a_change, 7, id="a change"), pytest.param(at_a_request, 3, id="a request"),
    pytest.param(before_a_change, 1, id="each change", marks=EACH),
    pytest.param(at_a_request, 1, id="each request", marks=EACH),
])  # fmt: skip
def test_after_a_kill_each_rollout_is_trained_on_once(proxy: Proxy, kill: Kill, every: int) -> None:
    kills, agents = 0, Agents(proxy, "agents", renewed=True)
    with agents:
        for step in itertools.count(1):
            names = play(proxy, f"r{step}")
            killed = kill(proxy, 1 + every * (step - 1))
            ok(proxy.run("train", "--once"))
            found = [proxy.rollout(name) for name in names]
            assert {(rollout["step"], rollout["dropped"]) for rollout in found} == {(step, None)}
            (last, *earlier) = proxy.get("/policy/steps?limit=1000")["data"]
            assert (last["step"], last["metrics"]["rollouts_trained"], len(earlier)) == (step, len(names), step - 1)
            assert "publish_s" in last["metrics"]
            live, there = proxy.get("/policy")["live_version"], versions(proxy)
            assert (there[live]["step"], there[live]["verified"]) == (step, True)
            assert {version["status"] for version in there.values()} <= {"live", "ready", "failed"}
            assert ask(proxy, f"after-{step}", "after", mode="eval").headers["x-policy-version"] == str(live)
            if not killed:
                break
            kills += 1
    assert kills >= 2 and {*agents.statuses} == {200}
    weights = by_weights(proxy)
    assert {len(prints) for prints in weights.values()} == {1}, weights
    assert len(set.union(*weights.values())) == len(weights) > 1


def test_weights_that_a_killed_trainer_did_not_verify_are_verified_by_the_next_one(proxy: Proxy) -> None:
    names = play(proxy, "first")
    proxy.vllm.fault = Faulty.STALE
    assert killed_when(proxy, lambda asked: asked[-1:] == [COMPLETIONS])
    assert not versions(proxy)[1]["verified"]
    assert proxy.run("train", "--once").returncode == 1
    assert proxy.get("/policy")["live_version"] == 0
    assert "live" not in {version["status"] for number, version in versions(proxy).items() if number}
    proxy.vllm.fault = None
    ok(proxy.run("train", "--once"))
    live = versions(proxy)[proxy.get("/policy")["live_version"]]
    assert (live["step"], live["verified"], {proxy.rollout(name)["step"] for name in names}) == (1, True, {1})
