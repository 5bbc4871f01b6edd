"""`lightning-proxy dashboard`: the page over a store alone, which it leaves as it is."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from contract.system import free_port
from lightning_proxy.features.page.dashboard import IdleFile, end_when_written
from support.command_line import lightning
from support.dashboards import dashboard
from support.postgres import postgres_server

pytestmark = pytest.mark.sqlite  # it looks at files

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_the_store_of_a_stopped_proxy_can_be_looked_at_and_gets_no_files_beside_it(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
    async with dashboard(tmp_path / "store.db") as (url, key), aiohttp.ClientSession() as session:
        for path in ("/policy", "/policy/versions", "/status", "/rollouts/r1"):
            async with session.get(url + path, headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == 200
        assert [file.name for file in tmp_path.glob("store.db-*") if not file.name.endswith("-keeper")] == []


def test_ctrl_c_while_a_file_is_looked_at_stops() -> None:
    server = SimpleNamespace(should_exit=False)

    class Interrupted(IdleFile):
        def is_written(self) -> bool:
            server.should_exit = True
            return False

    end_when_written([Interrupted(Path("store.db"))], server)
    assert server.should_exit


def test_a_file_is_written_when_it_or_its_log_is_and_not_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE x (y)")
    idle = IdleFile(path)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
        reader.execute("SELECT * FROM x").fetchall()
        assert Path(f"{path}-wal").exists() and not idle.is_written()
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("INSERT INTO x VALUES (1)")
        assert idle.is_written()
    assert idle.is_written()  # also when the log is in the file


async def test_it_ends_when_somebody_else_uses_the_store(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
    argv = ("-m", "lightning_proxy", "dashboard", "--store", tmp_path / "store.db", "--port", str(free_port()))
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 60)
    await asyncio.sleep(1)
    async with running(tmp_path) as system:
        await system.chat("r2")
        _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1 and b"is in use again" in said


async def test_a_store_in_use_can_be_looked_at(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
        async with dashboard(tmp_path / "store.db") as (url, key), aiohttp.ClientSession() as session:
            await system.chat("r2")
            async with session.get(f"{url}/rollouts", headers={"Authorization": f"Bearer {key}"}) as answer:
                assert len((await answer.json())["data"]) == 2


async def test_the_stores_of_a_folder_are_listed_and_each_has_its_page(running: Running, tmp_path: Path) -> None:
    for name in ("a<b", "c"):
        (tmp_path / name).mkdir()
        async with running(tmp_path / name) as system:
            await system.chat(f"of-{name[0]}")
        (tmp_path / name / "store.db").rename(tmp_path / name / "lightning.db")
    async with dashboard(tmp_path, "2 stores") as (url, key), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/") as answer:
            assert answer.status == 401
        async with session.get(f"{url}/?key={key}") as answer:
            listed = await answer.text()
        assert re.findall(r'href="(./)#/\?key=[^"]+">([^<]+)</a>', listed) == [("0/", "a&lt;b"), ("1/", "c")]
        for n, rollout in enumerate(("of-a", "of-c")):
            async with session.get(f"{url}/{n}/") as answer:
                assert "<title>lightning-proxy</title>" in await answer.text()
            async with session.get(f"{url}/{n}/page/app.mjs") as answer:
                assert answer.status == 200
            async with session.get(f"{url}/{n}/rollouts") as answer:
                assert answer.status == 401
            async with session.get(f"{url}/{n}/rollouts", headers={"Authorization": f"Bearer {key}"}) as answer:
                assert [one["rollout_id"] for one in (await answer.json())["data"]] == [rollout]


async def test_a_folders_list_has_new_stores_and_held_out_rewards(running: Running, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        async with running(tmp_path / name) as system:
            await system.chat("r1", X_Rollout_Mode="eval")
            await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 0.25})
    (tmp_path / "a" / "store.db").rename(tmp_path / "a" / "lightning.db")
    async with dashboard(tmp_path, "1 store") as (url, key), aiohttp.ClientSession() as session:
        (tmp_path / "b" / "store.db").rename(tmp_path / "b" / "lightning.db")
        async with session.get(f"{url}/?key={key}") as answer:
            listed = await answer.text()
        assert re.findall(r'href="(./)#/\?key=[^"]+">([^<]+)</a>', listed) == [("0/", "a"), ("1/", "b")]
        assert listed.count('<td data-label="held out">0.25</td>') == 2
        async with session.get(f"{url}/1/rollouts", headers={"Authorization": f"Bearer {key}"}) as answer:
            assert [one["rollout_id"] for one in (await answer.json())["data"]] == ["r1"]
        async with session.get(f"{url}/2/") as answer:
            assert answer.status == 404


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
                async with session.get(f"{page}/rollouts", headers={"Authorization": f"Bearer {key}"}) as answer:
                    assert len((await answer.json())["data"]) == 2
