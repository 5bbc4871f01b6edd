"""CONTRACT.md, section 4: nothing acknowledged is lost."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from contract.system import Served, in_this_process, served
from contract.vllm import PlayedVllm

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Agent(threading.Thread):
    """Calls and rewards until the proxy is gone; remembers what it received whole."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__()
        self.url, self.name_ = url, name
        self.calls: list[tuple[str, str]] = []  # rollout and call
        self.rewards: list[tuple[str, int]] = []

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as client:
                for turn in range(10_000):
                    self._turn(client, f"{self.name_}-{turn}", stream=turn % 2 == 0)
        except httpx.HTTPError:
            pass

    def _turn(self, client: httpx.Client, rollout: str, *, stream: bool) -> None:
        answer = client.post(f"/rollouts/{rollout}/v1/chat/completions", json=CHAT | {"stream": stream})
        assert answer.status_code == 200
        if stream and not answer.content.endswith(b"data: [DONE]\n\n"):
            return
        self.calls.append((rollout, answer.headers["x-call-id"]))
        reward = client.post("/reward", json={"rollout_id": rollout, "reward": 1})
        self.rewards.append((rollout, reward.json()["reward_id"]))


def work_until_killed(proxy: Served, agents: list[Agent]) -> None:
    for agent in agents:
        agent.start()
    time.sleep(0.5 + random.random())
    proxy.server.end(signal.SIGKILL)
    for agent in agents:
        agent.join()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_proxy_has_lost_no_answer_and_no_reward(tmp_path: Path, workers: int) -> None:
    with served(tmp_path, proxy={"workers": workers}) as proxy:
        agents: list[Agent] = []
        for round_ in range(2):
            agents += (mine := [Agent(proxy.url, f"a{round_}-{i}") for i in range(8)])
            work_until_killed(proxy, mine)
            proxy.start()
        assert sum(len(agent.calls) for agent in agents) > 20
        statuses = set()
        for agent in agents:
            rewarded = dict(agent.rewards)
            for rollout, call_id in agent.calls:
                found = proxy.rollout(rollout)
                assert [call["call_id"] for call in found["calls"]] == [call_id]
                assert found["calls"][0]["response"] and found["calls"][0]["status"] == "ok"
                if rollout in rewarded:
                    assert [one["reward_id"] for one in found["rewards"]] == [rewarded[rollout]]
            statuses |= {one["status"] for one in proxy.get("/rollouts?limit=1000")["data"]}
        assert statuses <= {"running", "completed"}


def ask_in_vain(proxy: Served) -> None:
    with pytest.raises(httpx.HTTPError):
        proxy.chat("r1")


def test_a_call_that_was_under_way_is_there_as_incomplete(tmp_path: Path) -> None:
    vllm = PlayedVllm(tmp_path)
    vllm.delay_s = 30
    with served(tmp_path, vllm) as proxy:
        agent = threading.Thread(target=ask_in_vain, args=[proxy])
        agent.start()
        while not vllm.requests:
            time.sleep(0.02)
        proxy.server.end(signal.SIGKILL)
        agent.join()
        proxy.start()
        (call,) = proxy.rollout("r1")["calls"]
        assert call["status"] == "incomplete" and not call["trainable"]


def test_stopped_in_good_order_it_finishes_what_is_under_way(tmp_path: Path) -> None:
    vllm = PlayedVllm(tmp_path)
    vllm.delay_s = 1.0
    with served(tmp_path, vllm) as proxy:
        answers: list[int] = []
        agent = threading.Thread(target=lambda: answers.append(proxy.chat("r1").status))
        agent.start()
        while not vllm.requests:
            time.sleep(0.02)
        assert proxy.server.end(signal.SIGTERM) == 0
        agent.join()
        assert answers == [200] and "not written" not in proxy.server.log.read_text()
        proxy.start()
        assert proxy.rollout("r1")["calls"][0]["status"] == "ok"


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
