"""Nothing acknowledged is lost: the proxy as a real process, killed, short of disk, or locked out of its store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import sqlite3
from pathlib import Path

import aiohttp
import pytest

from support.served import Client, proxy_in_front

# KILL_ROUNDS=50 KILL_CLIENTS=256 for the long version: four minutes.
ROUNDS, CLIENTS = int(os.environ.get("KILL_ROUNDS", "4")), int(os.environ.get("KILL_CLIENTS", "16"))


@pytest.mark.timeout(1200)
async def test_a_killed_proxy_has_lost_no_answer_and_no_reward(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy:
        clients = [Client(proxy, f"c{i}") for i in range(CLIENTS)]
        for round_ in range(ROUNDS):
            await proxy.start()
            for client in clients:
                client._name += f".{round_}"
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                working = [asyncio.create_task(client.work(session)) for client in clients]
                await asyncio.sleep(0.3 + random.random())
                await proxy.end(signal.SIGKILL)
                await asyncio.gather(*working)
        received = {call for client in clients for call in client.calls}
        rewarded = {reward for client in clients for reward in client.rewards}
        print(f"{ROUNDS} kills, {CLIENTS} clients: {len(received)} answers and {len(rewarded)} rewards received whole")
        assert len(received) > CLIENTS
        assert received <= {call for (call,) in proxy.rows("SELECT call_id FROM calls WHERE status = 'ok'")}
        assert rewarded <= {reward for (reward,) in proxy.rows("SELECT reward_id FROM rewards")}
        assert {status for (status,) in proxy.rows("SELECT DISTINCT status FROM calls")} <= {"ok", "incomplete"}
        await proxy.start()
        async with aiohttp.ClientSession() as session:
            await clients[0].turn(session, "afterwards", stream=True)
        assert proxy.rows("SELECT status FROM calls WHERE rollout_id = 'afterwards'") == [("ok",)]


async def test_a_full_disk_is_a_503_and_leaves_nothing_half_recorded(tmp_path: Path) -> None:
    def little_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))

    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        client = Client(proxy, "c")
        await proxy.start(little_disk)
        for i in range(60):
            await client.turn(session, f"r{i}", stream=False, padding=20_000 + i)
        assert client.statuses == {200, 503}
        assert client.calls == {call for (call,) in proxy.rows("SELECT call_id FROM calls WHERE status = 'ok'")}
        await client.turn(session, "full", stream=False, padding=600_000)
        async with session.get(f"{proxy.url}/readyz") as answer:
            assert answer.status == 503 and "be written: " in (await answer.json())["store"]
        assert proxy.process is not None
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, unlimited)
        await client.turn(session, "afterwards", stream=False, padding=20_000)
        async with session.get(f"{proxy.url}/readyz") as answer:
            assert answer.status == 200
        assert proxy.rows("SELECT status FROM calls WHERE rollout_id = 'afterwards'") == [("ok",)]


async def test_a_locked_store_is_a_503_until_it_is_free_again(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        client = Client(proxy, "c")
        await proxy.start()
        with contextlib.closing(sqlite3.connect(proxy.store, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await client.turn(session, "locked", stream=True)
            other.execute("ROLLBACK")
        assert (client.statuses, client.calls) == ({503}, set())
        assert proxy.rows("SELECT * FROM calls") == []
        await client.turn(session, "free", stream=True)
        assert len(client.calls) == 1
