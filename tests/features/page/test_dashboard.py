"""`lightning-proxy dashboard`: the page over a store alone. tests/contract checks that it changes nothing."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from contract.system import free_port
from support.command_line import lightning
from support.stores import postgres_server


@asynccontextmanager
async def dashboard(store: Path | str, where: str | None = None) -> AsyncIterator[tuple[str, str]]:
    """Its address and its key. `where`: the store as it is shown."""
    argv = (sys.executable, "-m", "lightning_proxy", "dashboard", "--store", str(store), "--port", str(free_port()))
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        said = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        found = re.search(r"(http://[^/]+)/#/\?key=(\S+)", said)
        assert found is not None and said.startswith(f"{where or store}: "), said
        async with aiohttp.ClientSession(headers={"Connection": "close"}) as session:
            while True:
                try:
                    async with session.get(f"{found[1]}/readyz") as answer:
                        assert (await answer.json())["status"] == "alone"
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.1)
        yield found[1], found[2]
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 0


pytestmark = pytest.mark.sqlite  # it looks at files

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def rollouts(session: aiohttp.ClientSession, url: str, key: str) -> list[str]:
    async with session.get(f"{url}/rollouts", headers={"Authorization": f"Bearer {key}"}) as answer:
        return [one["rollout_id"] for one in (await answer.json())["data"]]


async def test_it_ends_when_somebody_else_uses_a_store_that_nobody_used(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
    argv = ("-m", "lightning_proxy", "dashboard", "--store", tmp_path / "store.db", "--port", str(free_port()))
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 60)
    async with running(tmp_path) as system:
        await system.chat("r2")
        _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1 and b"is in use again" in said


async def test_a_store_in_use_can_be_looked_at(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
        async with dashboard(tmp_path / "store.db") as (url, key), aiohttp.ClientSession() as session:
            await system.chat("r2")
            assert await rollouts(session, url, key) == ["r2", "r1"]


async def test_a_store_on_a_server_can_be_looked_at(running: Running, tmp_path: Path) -> None:
    with postgres_server() as server:
        url = server.new_database()
        where = url.replace("lightning@", "").partition("?")[0]
        missing = await asyncio.to_thread(lightning, "dashboard", "--store", url, "--port", str(free_port()))
        assert missing.returncode == 2 and f"store {where} cannot be opened: it is empty" in missing.stderr
        async with running(tmp_path, store={"url": url}) as system:
            await system.chat("r1")
            async with dashboard(url, where) as (page, key), aiohttp.ClientSession() as session:
                await system.chat("r2")
                assert await rollouts(session, page, key) == ["r2", "r1"]
