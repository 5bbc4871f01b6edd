"""A PostgreSQL server that is there and says nothing: calls get a 503 soon, and answers when it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.store.opening import opened
from support.stores import Server, postgres_server

pytestmark = pytest.mark.sqlite  # it brings its own server
PATIENCE_S = 0.5
SOON_S = 30.0  # far less than the 120 s of work that nobody waits for
REWARD = {"rollout_id": "before", "reward": 1.0, "final": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@asynccontextmanager
async def frozen(server: Server) -> AsyncIterator[None]:
    pids = [*server.pids()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def test_calls_rewards_and_probes_get_a_503_while_the_server_says_nothing(
    server: Server, running: Any, tmp_path: Path
) -> None:
    store = {"url": server.new_database(), "busy_timeout_s": PATIENCE_S}
    async with running(tmp_path, store=store) as system:
        assert (await system.chat("before"))[0] == 200
        key = (await system.call("POST", "/rollouts", {}))[1][0]["api_key"]
        system.vllm.delay_s = 1.0
        under_way = [asyncio.create_task(system.chat("before")) for _ in range(2)]
        await asyncio.sleep(0.5)
        system.vllm.delay_s = 0.0
        async with frozen(server), asyncio.timeout(SOON_S):
            calls = [system.chat(f"r{n}") for n in range(6)]
            calls += [system.chat("before"), system.chat("by-key", Authorization=f"Bearer {key}")]
            calls += [system.call("POST", "/v1/chat/completions", {"model": "policy", "messages": []})]
            answers = await asyncio.gather(*calls, *under_way)
            assert {status for status, _ in answers} == {503}, answers
            assert (await system.call("POST", "/reward", REWARD))[0] == 503
            status, view = await system.call("GET", "/readyz")
            assert (status, view["status"]) == (503, "not ready")
            assert "does not answer" in str(view)
            async with system.session.get(system.url + "/metrics") as metrics:
                assert "lightning_store_up 0.0\n" in await metrics.text()
        async with asyncio.timeout(SOON_S):
            while (await system.chat("after"))[0] != 200:
                await asyncio.sleep(0.1)
        assert (await system.call("POST", "/reward", REWARD))[0] == 200


async def test_work_that_nobody_waits_for_has_longer(server: Server) -> None:
    config = StoreConfig(url=server.new_database(), busy_timeout_s=PATIENCE_S)
    async with opened(config) as database:
        assert len(await database.all(f"SELECT 1 AS n, pg_sleep({3 * PATIENCE_S})::TEXT AS slept")) == 1
        await database.write(lambda db: db.all(f"SELECT 1 AS n, pg_sleep({3 * PATIENCE_S})::TEXT AS slept"))
