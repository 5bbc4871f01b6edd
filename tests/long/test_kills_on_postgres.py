"""Two real proxies over one PostgreSQL server, killed again and again under load: nothing acknowledged is lost.

KILL_ROUNDS (50) and KILL_AGENTS (16) say how long and how hard.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from support.postgres import Server, postgres_server
from support.served import Proxy, proxy_in_front

ROUNDS, AGENTS = int(os.environ.get("KILL_ROUNDS", "50")), int(os.environ.get("KILL_AGENTS", "16"))
TURNS = 3  # of a rollout
PROGRESS = 40  # answers from one round to the next
LATER_S = 0.1
REWARDED_TWICE = "SELECT COUNT(*) FROM (SELECT 1 FROM rewards GROUP BY rollout_id HAVING COUNT(*) > 1) AS twice"
COUNTED_WRONG = """
SELECT COUNT(*) FROM rollouts
WHERE calls <> (SELECT COUNT(*) FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND status <> 'incomplete')
"""


class Refused(Exception):
    """The proxy said 503."""


class Agents:
    """What all agents did and were told. They send again what was refused or broke, through either proxy."""

    def __init__(self, proxies: list[Proxy]) -> None:
        self.proxies = proxies
        self.asked: set[str] = set()
        self.answered: dict[str, str] = {}  # the call that a question's whole answer came from
        self.rewarded: dict[str, int] = {}  # by rollout
        self.statuses: Counter[int] = Counter()
        self.broken = 0
        self.stopped = False

    async def work(self, session: aiohttp.ClientSession, name: str) -> None:
        number = 0
        while not self.stopped:
            number += 1
            await self.rollout(session, f"{name}-{number}")

    async def rollout(self, session: aiohttp.ClientSession, rollout_id: str) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            question = f"{rollout_id}, question {turn}"
            messages.append({"role": "user", "content": question})
            self.asked.add(question)
            stream = turn % 2 == 0
            path = f"/rollouts/{rollout_id}/v1/chat/completions"
            headers, _ = await self.until_told(
                session,
                path,
                {"model": "policy", "stream": stream, "messages": messages},
                retries="x-stainless-retry-count",
            )
            self.answered[question] = headers["X-Call-Id"]
            messages.append({"role": "assistant", "content": "x"})
        body = {"rollout_id": rollout_id, "reward": 1}
        _, said = await self.until_told(session, "/reward", body, {"Idempotency-Key": rollout_id})
        self.rewarded[rollout_id] = said["reward_id"]

    async def until_told(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        retries: str = "",
    ) -> tuple[Any, Any]:
        """The headers and the body of the first whole answer."""
        headers = headers or {}
        for attempt in range(10_000):
            if retries and attempt:
                headers[retries] = str(attempt)
            try:
                return await self.told(session, random.choice(self.proxies).url + path, body, headers)
            except Refused:
                pass
            except (aiohttp.ClientError, ConnectionError):
                self.broken += 1
            await asyncio.sleep(LATER_S * random.random())
        raise AssertionError(f"{path}: never answered")

    async def told(
        self, session: aiohttp.ClientSession, url: str, body: Any, headers: dict[str, str]
    ) -> tuple[Any, Any]:
        async with session.post(url, json=body, headers=headers) as answer:
            data = await answer.read()
            self.statuses[answer.status] += 1
            if answer.status == 503:
                assert "Retry-After" in answer.headers, data
                raise Refused
            assert answer.status == 200, data
            if body.get("stream"):
                assert data.endswith(b"data: [DONE]\n\n")
                return answer.headers, None
            return answer.headers, await answer.json()


@contextlib.asynccontextmanager
async def two_proxies(directory: Path, url: str) -> AsyncIterator[list[Proxy]]:
    async with contextlib.AsyncExitStack() as stack:
        proxies = []
        for name in ("a", "b"):
            (own := directory / name).mkdir()
            proxies.append(proxy := await stack.enter_async_context(proxy_in_front(own)))
            proxy.set("store", url=url)
            proxy.set("policy", directory=str(directory / "policy"))
        await asyncio.gather(*(proxy.start() for proxy in proxies))
        yield proxies


async def kill(round_: int, server: Server, proxies: list[Proxy]) -> None:
    """By turns a proxy, the other one, the server, and all of them."""
    victims = [[proxies[0]], [server], [proxies[1]], [server], [*proxies, server]][round_ % 5]
    for victim in victims:
        if isinstance(victim, Proxy):
            await victim.end(signal.SIGKILL)
        else:
            await asyncio.to_thread(victim.kill)
    for victim in reversed(victims):
        await (victim.start() if isinstance(victim, Proxy) else asyncio.to_thread(victim.start))


@pytest.mark.timeout(3000)
async def test_what_was_acknowledged_is_there_once_after_proxies_and_server_were_killed(tmp_path: Path) -> None:
    with postgres_server(fsync="on") as server:
        url = server.new_database()
        async with two_proxies(tmp_path, url) as proxies:
            agents = Agents(proxies)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                working = [asyncio.create_task(agents.work(session, f"a{i}")) for i in range(AGENTS)]
                for round_ in range(ROUNDS):
                    enough = len(agents.answered) + PROGRESS
                    while len(agents.answered) < enough and not any(one.done() for one in working):
                        await asyncio.sleep(0.02)
                    await asyncio.sleep(random.random() / 2)
                    await kill(round_, server, proxies)
                agents.stopped = True
                await asyncio.gather(*working)
            await check(agents, url)


async def check(agents: Agents, url: str) -> None:
    db = await asyncpg.connect(url)
    try:
        calls = await db.fetch("SELECT call_id, rollout_id, status, superseded_by FROM calls ORDER BY rowid")
        rewards = {row["rollout_id"]: row["reward_id"] for row in await db.fetch("SELECT * FROM rewards")}
        twice, wrong = await db.fetchval(REWARDED_TWICE), await db.fetchval(COUNTED_WRONG)
    finally:
        await db.close()
    status = {row["call_id"]: row["status"] for row in calls}
    lost = [call for call in agents.answered.values() if status.get(call) != "ok"]
    kinds = Counter(row["status"] for row in calls)
    print(
        f"{ROUNDS} kills, {AGENTS} agents: {len(agents.answered)} answers and {len(agents.rewarded)} rewards "
        f"acknowledged, {len(lost)} lost; answers by status {dict(agents.statuses)}, {agents.broken} broken; "
        f"calls in the store {dict(kinds)}, superseded {sum(row['superseded_by'] is not None for row in calls)}"
    )
    assert not lost and agents.asked == agents.answered.keys()
    assert set(kinds) <= {"ok", "incomplete", "error", "cancelled"}
    decisions = Counter(row["rollout_id"] for row in calls if row["status"] == "ok" and row["superseded_by"] is None)
    assert {rollout_id: decisions[rollout_id] for rollout_id in agents.rewarded} == dict.fromkeys(
        agents.rewarded, TURNS
    )
    assert agents.rewarded == rewards and twice == 0
    assert wrong == 0
