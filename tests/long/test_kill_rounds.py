"""Nothing acknowledged is missing, and nothing is there twice: workers, proxies and the store's server are killed.

`make kill-rounds`: KILL_ROUNDS says how often.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.served import Proxy, proxy_in_front, serves, settled, workers
from support.stores import Server, postgres_server

ROUNDS, AGENTS = int(os.environ.get("KILL_ROUNDS", "5")), 64
WORKERS, TURNS = 2, 4
LARGE = "." * 20_000  # of a prompt that is stored apart from its call
DAY = 86_400
COUNTED_WRONG = """
SELECT rollout_id FROM rollouts
WHERE calls <> (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND status <> 'incomplete')
"""


class Received:
    """What all agents were told: the call that answered each turn, rollouts by turn, and rewards by rollout."""

    def __init__(self) -> None:
        self.calls: dict[str, str] = {}
        self.rollouts: dict[str, str] = {}
        self.rewards: dict[str, int] = {}
        self.statuses: Counter[int] = Counter()
        self.retries = 0


class Agent:
    """One conversation after another; as official clients do, it sends again what was not answered whole.

    The question of each turn is a name that no other turn has. With one proxy, every third names no rollout.
    """

    def __init__(self, proxies: Sequence[Proxy], number: int, received: Received) -> None:
        self._proxies, self._number, self._received = proxies, number, received

    async def work(self, session: aiohttp.ClientSession) -> None:
        for n in itertools.count(self._number):
            named = n % 3 > 0 or len(self._proxies) > 1
            await self._converse(session, f"a{self._number}.{n}", named=named, is_large=n % 4 == 0)

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
            url = random.choice(self._proxies).url + path
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                async with session.post(url, json=body, headers=told) as answer:
                    data = await answer.read()
                    self._received.statuses[answer.status] += 1
                    if answer.status == 200:
                        assert not body.get("stream") or data.endswith(b"data: [DONE]\n\n")
                        return answer.headers, data
            self._received.retries += 1
            await asyncio.sleep(random.uniform(0.1, 0.5))
        raise AssertionError


@asynccontextmanager
async def at_work(proxies: Sequence[Proxy], received: Received) -> AsyncIterator[None]:
    """Let all agents work during the block."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        working = [asyncio.create_task(Agent(proxies, n, received).work(session)) for n in range(AGENTS)]
        try:
            yield
            assert not any(task.done() for task in working), "an agent gave up"
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


class Books:
    """Compares the store with what the agents received. What has been found right is made old: retention deletes it."""

    def __init__(self, url: str, received: Received) -> None:
        self._config, self._received = StoreConfig(url=url, busy_timeout_s=60), received
        self.old: set[str] = set()
        self.left: set[str] = set()

    async def check(self) -> None:
        """Require that all that was acknowledged is there, and that no turn and no reward is there twice."""
        answered, rewarded = dict(self._received.calls), dict(self._received.rewards)
        async with opened(self._config) as database:
            self.left = {row["rollout_id"] for row in await database.all("SELECT rollout_id FROM rollouts")}
            found = await self._trainable(Store(database))
            rows = await database.all("SELECT rollout_id, reward_id FROM rewards")
            miscounted = {row["rollout_id"] for row in await database.all(COUNTED_WRONG)}
            assert miscounted.isdisjoint(rewarded.keys() - self.old)
            rewards = [(row["rollout_id"], row["reward_id"]) for row in rows]
            assert {question: calls for question, calls in found.items() if len(calls) > 1} == {}
            kept = {q: call for q, call in answered.items() if self._received.rollouts[q] not in self.old}
            assert {q: call for q, call in kept.items() if found.get(q) != {call}} == {}
            assert len(dict(rewards)) == len(rewards)
            assert {(rollout, reward) for rollout, reward in rewarded.items() if rollout not in self.old} <= {*rewards}
            for table, columns in (("rollouts", ("created_at", "ended_at")), ("calls", ("started_at",))):
                earlier = ", ".join(f"{column} = {column} - {2 * DAY}" for column in columns)
                sql = f"UPDATE {table} SET {earlier} WHERE rollout_id = :id"
                await database.commit([(sql, [{"id": one} for one in rewarded.keys() - self.old])])
        self.old |= rewarded.keys()

    async def _trainable(self, store: Store) -> dict[str, set[str]]:
        """The calls that may be trained on, by their turn."""
        found: dict[str, set[str]] = defaultdict(set)
        for rollout_id in self.left - self.old:
            calls = await store.calls.of(rollout_id)
            questions = [call.request["messages"][-1]["content"] for call in calls]
            assert len({question.partition(":")[0] for question in questions}) <= 1, "another's turn is in it"
            assert [call.seq for call in calls] == list(range(len(calls)))
            for call, question in zip(calls, questions, strict=True):
                if call.trainable:
                    found[question].add(call.call_id)
        return found


async def rounds(proxies: Sequence[Proxy], url: str, kill: Callable[[int], Awaitable[None]]) -> None:
    received = Received()
    books = Books(url, received)
    async with at_work(proxies, received):
        for number in range(ROUNDS):
            await asyncio.sleep(0.5 + random.random())
            await kill(number)
            await books.check()
    await books.check()
    print(
        f"{ROUNDS} kills, {AGENTS} agents: {len(received.calls)} answers and {len(received.rewards)} rewards received "
        f"whole, {received.retries} requests sent again. Deleted by age: {len(books.old - books.left)} rollouts"
    )
    assert set(received.statuses) <= {200, 503}
    assert received.retries > AGENTS
    assert books.old - books.left


@pytest.mark.sqlite
@pytest.mark.timeout(300 + 40 * ROUNDS)
async def test_no_kill_of_workers_or_the_proxy_loses_or_doubles_what_was_acknowledged(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy:

        async def kill(number: int) -> None:
            """Kill a worker, all of them, or the whole proxy, and wait until a worker serves."""
            assert proxy.process is not None
            found, what = workers(proxy), ("worker", "proxy", "worker", "workers")[number % 4]
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

        proxy.set("proxy", workers=WORKERS)
        proxy.set("store", busy_timeout_s=20, retention={"max_age_days": 1})
        await proxy.start()
        await settled(proxy, WORKERS)
        await rounds([proxy], f"sqlite:///{proxy.store}", kill)


@pytest.mark.timeout(300 + 40 * ROUNDS)
async def test_no_kill_of_two_proxies_or_their_postgresql_loses_or_doubles_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    with postgres_server(fsync="on") as server:
        url = server.new_database()
        async with contextlib.AsyncExitStack() as stack:
            proxies = []
            for name in ("a", "b"):
                (own := tmp_path / name).mkdir()
                proxies.append(proxy := await stack.enter_async_context(proxy_in_front(own)))
                proxy.set("store", url=url, retention={"max_age_days": 1})
                proxy.set("policy", directory=str(tmp_path / "policy"))
            await asyncio.gather(*(proxy.start() for proxy in proxies))

            async def kill(number: int) -> None:
                """By turns a proxy, the other one, the server, and all of them."""
                one, other = proxies
                victims: list[Proxy | Server] = [[one], [server], [other], [server], [one, other, server]][number % 5]
                for victim in victims:
                    if isinstance(victim, Proxy):
                        await victim.end(signal.SIGKILL)
                    else:
                        await asyncio.to_thread(victim.kill)
                for victim in reversed(victims):
                    await (victim.start() if isinstance(victim, Proxy) else asyncio.to_thread(victim.start))

            await rounds(proxies, url, kill)
