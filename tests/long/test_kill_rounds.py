"""Nothing acknowledged is missing, and nothing is there twice: workers, and the whole proxy, killed again and again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.served import Proxy, proxy_in_front, serves, settled, workers

# `make kill-rounds`: 200 of them.
ROUNDS, AGENTS = int(os.environ.get("KILL_ROUNDS", "4")), 64
KILLED = ("worker", "proxy", "worker", "workers")
WORKERS, TURNS = 2, 4
LARGE = "." * 20_000  # of a prompt that is stored apart from its call
DAY = 86_400


@dataclass
class Received:
    """What all agents were told: the call that answered each turn, rollouts by turn, and rewards by rollout."""

    calls: dict[str, str] = field(default_factory=dict)
    rollouts: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, int] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    retries: int = 0


class Agent:
    """One conversation after another; as official clients do, it sends again what was not answered whole.

    The question of each turn is a name that no other turn has. Every third conversation names no rollout.
    """

    def __init__(self, proxy: Proxy, number: int, received: Received) -> None:
        self._proxy, self._number, self._received = proxy, number, received

    async def work(self, session: aiohttp.ClientSession) -> None:
        for n in itertools.count(self._number):
            await self._converse(session, f"a{self._number}.{n}", named=n % 3 > 0, is_large=n % 4 == 0)

    async def _converse(self, session: aiohttp.ClientSession, name: str, *, named: bool, is_large: bool) -> None:
        messages: list[dict[str, str]] = [{"role": "system", "content": LARGE if is_large else "."}]
        path, rollout_id = f"/rollouts/{name}/v1" if named else "/v1", ""
        for turn in range(TURNS):
            question = f"{name}:{turn}"
            messages.append({"role": "user", "content": question})
            body = {"model": "policy", "messages": messages, "stream": turn % 2 == 1}
            headers, said = await self._post(session, f"{path}/chat/completions", body)
            messages.append({"role": "assistant", "content": "x" * said.count(b'"x"')})
            self._received.calls[question] = headers["X-Call-Id"]
            rollout_id = self._received.rollouts[question] = headers["X-Rollout-Id"]
        reward = {"rollout_id": rollout_id, "reward": 1.0}
        _, said = await self._post(session, "/reward", reward, {"Idempotency-Key": name})
        self._received.rewards[rollout_id] = json.loads(said)["reward_id"]

    async def _post(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[Any, bytes]:
        for attempt in itertools.count():
            told = {"x-stainless-retry-count": str(attempt), **(headers or {})}
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                async with session.post(self._proxy.url + path, json=body, headers=told) as answer:
                    data = await answer.read()
                    self._received.statuses[answer.status] += 1
                    if answer.status == 200:
                        assert not body.get("stream") or data.endswith(b"data: [DONE]\n\n")
                        return answer.headers, data
            self._received.retries += 1
            await asyncio.sleep(random.uniform(0.1, 0.5))
        raise AssertionError


@asynccontextmanager
async def at_work(proxy: Proxy, received: Received) -> AsyncIterator[None]:
    """Let all agents work during the block."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        working = [asyncio.create_task(Agent(proxy, n, received).work(session)) for n in range(AGENTS)]
        try:
            yield
            assert not any(task.done() for task in working), "an agent gave up"
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


async def kill(proxy: Proxy, what: str) -> None:
    """Kill a worker, all workers, or the whole proxy, and wait until a worker serves that was left or is new."""
    assert proxy.process is not None
    found = workers(proxy)
    killed = {random.choice(sorted(found))} if what == "worker" and found else found
    if what == "proxy":
        os.kill(proxy.process.pid, signal.SIGKILL)  # first: it would start others
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if what == "proxy":
        await proxy.process.wait()
        await proxy.start()
    async with asyncio.timeout(120):
        while not any(map(serves, workers(proxy) - killed)):
            await asyncio.sleep(0.1)


class Books:
    """Compares the store with what the agents received. What has been found right is made old: retention deletes it."""

    def __init__(self, proxy: Proxy, received: Received) -> None:
        self._proxy, self._received = proxy, received
        self.old: set[str] = set()

    async def check(self) -> None:
        """Require that all that was acknowledged is there, and that no turn and no reward is there twice."""
        answered, rewarded = dict(self._received.calls), dict(self._received.rewards)
        found = await self._trainable()
        assert {question: calls for question, calls in found.items() if len(calls) > 1} == {}
        kept = {q: call for q, call in answered.items() if self._received.rollouts[q] not in self.old}
        assert {q: call for q, call in kept.items() if found.get(q) != {call}} == {}
        rewards = self._proxy.rows("SELECT rollout_id, reward_id FROM rewards")
        assert len({rollout_id for rollout_id, _ in rewards}) == len(rewards)
        assert {(rollout_id, reward) for rollout_id, reward in rewarded.items() if rollout_id not in self.old} <= set(
            rewards
        )
        await asyncio.to_thread(self._age, rewarded.keys() - self.old)

    async def _trainable(self) -> dict[str, set[str]]:
        """The calls that may be trained on, by their turn."""
        found: dict[str, set[str]] = defaultdict(set)
        async with opened(StoreConfig(url=f"sqlite:///{self._proxy.store}"), to_write=False) as database:
            store = Store(database)
            for (rollout_id,) in self._proxy.rows("SELECT rollout_id FROM rollouts"):
                if rollout_id in self.old:
                    continue
                calls = await store.calls.of(rollout_id)
                questions = [call.request["messages"][-1]["content"] for call in calls]
                assert len({question.partition(":")[0] for question in questions}) <= 1, "another's turn is in it"
                assert [call.seq for call in calls] == list(range(len(calls)))
                for call, question in zip(calls, questions, strict=True):
                    if call.trainable:
                        found[question].add(call.call_id)
        return found

    def _age(self, rollouts: set[str]) -> None:
        with contextlib.closing(sqlite3.connect(self._proxy.store, timeout=60)) as db, db:
            for table, columns in (("rollouts", ("created_at", "ended_at")), ("calls", ("started_at",))):
                earlier = ", ".join(f"{column} = {column} - {2 * DAY}" for column in columns)
                db.executemany(f"UPDATE {table} SET {earlier} WHERE rollout_id = ?", [(one,) for one in rollouts])
        self.old |= rollouts


@pytest.mark.sqlite
@pytest.mark.timeout(300 + 40 * ROUNDS)
async def test_no_kill_loses_or_doubles_what_was_acknowledged(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy:
        proxy.set("proxy", workers=WORKERS)
        proxy.set("store", busy_timeout_s=20, retention={"max_age_days": 1})
        await proxy.start()
        await settled(proxy, WORKERS)
        received = Received()
        books = Books(proxy, received)
        async with at_work(proxy, received):
            for what in itertools.islice(itertools.cycle(KILLED), ROUNDS):
                await asyncio.sleep(0.5 + random.random())
                await kill(proxy, what)
                await books.check()
        await books.check()
        left = {rollout_id for (rollout_id,) in proxy.rows("SELECT rollout_id FROM rollouts")}
        rollouts = {(question.partition(":")[0], rollout_id) for question, rollout_id in received.rollouts.items()}
        split = len(rollouts) - len({conversation for conversation, _ in rollouts})
        print(
            f"{ROUNDS} kills, {AGENTS} agents: {len(received.calls)} answers and {len(received.rewards)} rewards "
            f"received whole, {received.retries} requests sent again. Answered in two rollouts: {split} conversations. "
            f"Deleted by age: {len(books.old - left)} rollouts"
        )
        assert set(received.statuses) <= {200, 503}
        assert received.retries > AGENTS
        assert books.old - left
