"""The page's files, all of the proxy's own, under a policy that lets nothing else in; its feeds; `dashboard`."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from contract.system import Process, free_port, wait_until
from lightning_proxy.features.page.proxy import FILES, POLICY, files
from lightning_proxy.store.sqlite.database import SqliteDatabase
from support.command_line import lightning
from support.stores import postgres_server

TEXTS = {name: body.decode() for name, body in files().items()}
MARKUP = r"innerHTML|outerHTML|insertAdjacent|dangerously|document\.write|\beval\(|new Function"


async def test_a_file_has_its_type_and_is_not_sent_twice(start: Any) -> None:
    assert "; form-action 'none'" in POLICY  # tests/contract has the rest
    async with start() as system:
        for name, kind in {"app.mjs": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}.items():
            address = f"{system.url}/page/{name}"
            async with system.session.get(address) as answer:
                assert answer.content_type == kind
            async with system.session.get(address, headers={"If-None-Match": answer.headers["ETag"]}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")


def test_no_file_names_another_host_and_our_modules_take_no_text_as_markup_or_code() -> None:
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", TEXTS["index.html"])
    for name, text in TEXTS.items():
        if not name.endswith(".txt"):
            hosts = re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+[\w/]*", text)
            assert [one for one in hosts if "//www.w3.org/" not in one] == [], name
        if name.endswith("mjs") and not name.startswith("vendor/"):
            assert not re.search(MARKUP, text), name


def test_other_people_s_files_are_those_that_are_listed() -> None:
    listed = dict(re.findall(r"^\| `([^`]+)` .*`([0-9a-f]{64})` \|$", (FILES / "vendor/README.md").read_text(), re.M))
    vendored = {name.removeprefix("vendor/"): body for name, body in files().items() if name.startswith("vendor/")}
    code = {name: hashlib.sha256(body).hexdigest() for name, body in vendored.items() if ".LICENSE" not in name}
    assert code == listed


@pytest.mark.sqlite
async def test_many_feeds_look_at_the_store_as_often_as_one(start: Any) -> None:
    looks, found = patch.object(SqliteDatabase, "quick", autospec=True, side_effect=SqliteDatabase.quick), []
    async with start() as system, AsyncExitStack() as stack:
        quick = stack.enter_context(looks)
        for feeds in (1, 40):
            for _ in range(feeds):
                answer = await stack.enter_async_context(system.session.get(f"{system.url}/feed"))
                assert (await answer.content.readline()).startswith(b"id: ")
            quick.reset_mock()
            await asyncio.sleep(2)
            found.append(quick.call_count)
    assert 0 < found[1] < 3 * found[0]


# `dashboard`: the page over a store alone. tests/contract checks that it changes nothing.


@contextmanager
def dashboard(directory: Path, store: Any, where: Any) -> Iterator[Any]:
    """Its process, and what gets a path from it. `where`: the store as it is shown."""
    (directory / "config.yaml").touch()
    port = free_port()
    page = Process(directory, "dashboard", "--store", str(store), "--port", str(port))
    said = re.compile(rf"{where}: (http://127\.0\.0\.1:{port})/#/\?key=(\S+)")
    page.start()
    try:
        wait_until(lambda: said.search(page.log.read_text()), 60, "it says where it listens")
        ((address, key),) = said.findall(page.log.read_text())
        headers, patient = {"Authorization": f"Bearer {key}"}, httpx.HTTPTransport(retries=6)  # until it listens
        with httpx.Client(base_url=address, headers=headers, transport=patient) as client:
            yield page, lambda path: client.get(path).json()
    finally:
        assert not page.running or page.end(signal.SIGINT) == 0


@pytest.mark.sqlite
async def test_a_store_in_use_can_be_looked_at_and_one_that_nobody_used_until_somebody_does(
    start: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store.db"
    async with start() as system:
        await system.chat("r1")
        with dashboard(tmp_path, store, store) as (_, get):
            await system.chat("r2")
            assert [one["rollout_id"] for one in get("/rollouts")["data"]] == ["r2", "r1"]
            assert get("/readyz")["status"] == "alone"
    with dashboard(tmp_path, store, store) as (page, _):
        async with start() as system:
            await system.chat("r3")
            assert page.process.wait(30) == 1 and "was changed, so" in page.log.read_text()


@pytest.mark.sqlite  # it has a server of its own
async def test_a_store_on_a_server_can_be_looked_at(start: Any, tmp_path: Path) -> None:
    with postgres_server() as server:
        store = server.new_database()
        where = store.replace("lightning@", "").partition("?")[0]
        missing = await asyncio.to_thread(lightning, "dashboard", "--store", store, "--port", str(free_port()))
        assert missing.returncode == 2 and f"store {where} cannot be opened: it is empty" in missing.stderr
        async with start(store={"url": store}) as system:
            with dashboard(tmp_path, store, where) as (_, get):
                await system.chat("r1")
                assert [one["rollout_id"] for one in get("/rollouts")["data"]] == ["r1"]
