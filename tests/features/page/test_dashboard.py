"""`lightning-proxy dashboard`: the page over stores alone. That it leaves them as they are, tests/contract sees."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from contract.system import free_port
from support.command_line import lightning
from support.dashboards import dashboard
from support.postgres import postgres_server

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


async def test_the_stores_of_a_folder_are_listed_and_new_ones_too_and_each_has_its_page(
    running: Running, tmp_path: Path
) -> None:
    for name in ("a<b", "c"):
        (tmp_path / name).mkdir()
        async with running(tmp_path / name) as system:
            rollout = f"of-{name[0]}"
            await system.chat(rollout, X_Rollout_Mode="eval")
            await system.call("POST", "/reward", {"rollout_id": rollout, "reward": 0.25})
    (tmp_path / "a<b" / "store.db").rename(tmp_path / "a<b" / "lightning.db")
    async with dashboard(tmp_path, "1 store") as (url, key), aiohttp.ClientSession() as session:
        (tmp_path / "c" / "store.db").rename(tmp_path / "c" / "lightning.db")
        async with session.get(f"{url}/") as answer:
            assert answer.status == 401
        async with session.get(f"{url}/?key={key}") as answer:
            listed = await answer.text()
        assert re.findall(r'href="(./)#/\?key=[^"]+">([^<]+)</a>', listed) == [("0/", "a&lt;b"), ("1/", "c")]
        assert listed.count('<td data-label="held out">0.25</td>') == 2
        for path, status in (("0/", 200), ("1/page/app.mjs", 200), ("1/rollouts", 401), ("2/", 404)):
            async with session.get(f"{url}/{path}") as answer:
                assert answer.status == status, path
        assert [await rollouts(session, f"{url}/{n}", key) for n in (0, 1)] == [["of-a"], ["of-c"]]


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
