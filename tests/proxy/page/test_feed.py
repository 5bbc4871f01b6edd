"""`GET /feed`: what happens, as it happens, and from where a reader stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from lightning_proxy.proxy.store.sqlite.database import SqliteDatabase
from lightning_proxy.proxy.types import Limits

Running = Callable[..., AbstractAsyncContextManager[Any]]


class Event(NamedTuple):
    """One event of a stream. `kind` None: only an id."""

    n: int
    kind: str | None
    data: Any


class Reader:
    """Reads a feed's events, one after the other."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self) -> Event:
        fields: dict[str, str] = {}
        async with asyncio.timeout(10):
            while (line := (await self._answer.content.readline()).decode().rstrip("\n")) or "id" not in fields:
                assert not self._answer.content.at_eof(), "the feed ended"
                name, _, value = line.partition(": ")
                fields |= {name: value}
        return Event(int(fields["id"]), fields.get("event"), json.loads(fields.get("data", "null")))

    async def until(self, kind: str, **data: Any) -> Event:
        """The next event of a kind with these fields."""
        while True:
            event = await self.next()
            if event.kind == kind and event.data.items() >= data.items():
                return event

    async def rest(self) -> bytes:
        return await self._answer.content.read()


@asynccontextmanager
async def reading(system: Any, query: str = "", **headers: str) -> AsyncIterator[Reader]:
    async with system.session.get(f"{system.url}/feed{query}", headers=headers) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        yield Reader(answer)


async def test_a_feed_tells_of_calls_rewards_rollouts_steps_and_versions(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store, reading(system) as feed:
        begins = await feed.next()
        assert begins.kind is None  # only where a reader would go on from
        await system.chat("r1", X_Task_Id="t1", X_Agent_Name="writer")
        opened = await feed.until("rollout", rollout_id="r1")
        assert opened.data == {
            "rollout_id": "r1", "task_id": "t1", "mode": "train", "status": "running", "reward": None
        }  # fmt: skip
        call = (await feed.until("call")).data
        assert call["latency_ms"] > 0
        expected = {"rollout_id": "r1", "task_id": "t1", "seq": 0, "agent": "writer", "status": "ok"}
        assert call.items() >= {**expected, "policy_version": 0, "finish_reason": "stop"}.items()
        _, posted = await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 0.5, "source": "env"})
        reward = (await feed.until("reward")).data
        assert reward.items() >= {"reward_id": posted["reward_id"], "reward": 0.5, "source": "env"}.items()
        await feed.until("rollout", rollout_id="r1", status="completed", reward=0.5)
        await store.steps.trained(await store.steps.claim(["r1"], 0), None, {"reward_mean": 0.5})
        await feed.until("step", step=1, status="trained", reward=0.5)
        version = await store.versions.new("merged", 1, {})
        await store.versions.set_live(version, 1)
        await feed.until("version", version=version, live=True)


async def test_a_feed_goes_on_where_its_reader_stopped(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        async with reading(system) as feed:
            await system.chat("r1")
            seen = await feed.until("call", rollout_id="r1")
        await system.chat("r2")
        async with reading(system, f"?cursor={seen.n}") as feed:
            assert (await feed.next())[:2] == (seen.n, None)
            again = [await feed.next(), await feed.next()]
        async with reading(system, **{"Last-Event-ID": str(seen.n)}) as feed:
            assert [(await feed.next()).n, await feed.next(), await feed.next()] == [seen.n, *again]
        assert [(one.kind, one.data["rollout_id"]) for one in again] == [("rollout", "r2"), ("call", "r2")]


@pytest.mark.sqlite
async def test_a_reader_learns_that_it_missed_something(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await system.chat("r1")
        many = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 10100) " \
               "INSERT INTO feed (kind, ref) SELECT 'call', 'gone' FROM i"  # fmt: skip
        await store.database.commit([(many, [{}])])
        for cursor in (0, 10**9):  # forgotten; of another store
            async with reading(system, f"?cursor={cursor}") as feed:
                missed = await feed.next()
                assert missed.kind == "missed"
                await system.chat(f"after-{cursor}")
                assert (await feed.until("call")).data["rollout_id"] == f"after-{cursor}"
        rows = await store.database.all("SELECT COUNT(*) AS n FROM feed")
        assert rows[0]["n"] == 10_000


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5", "9" * 30])
async def test_a_cursor_that_is_none_is_refused(running: Running, tmp_path: Path, cursor: str) -> None:
    async with running(tmp_path) as system:
        status, answer = await system.call("GET", f"/feed?cursor={cursor}")
        assert (status, answer["error"]["param"]) == (400, "cursor")


async def test_a_key_hears_of_what_it_may_see(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["key"]) as system, system.store() as store:
        assert (await system.call("GET", "/feed"))[0] == 401
        _, (opened,) = await system.call("POST", "/rollouts", {}, Authorization="Bearer key")
        assert (await system.call("GET", "/feed", Authorization=f"Bearer {opened['api_key']}"))[0] == 403
        ann, bob = [
            (await store.keys.create(name, "agent", Limits(), recording=True, scope="own"))[0]
            for name in ("ann", "bob")
        ]
        await asyncio.sleep(0.8)  # stored keys are read twice a second
        async with reading(system, Authorization=f"Bearer {ann}") as feed:
            await system.chat("bobs", Authorization=f"Bearer {bob}")
            await system.chat("anns", Authorization=f"Bearer {ann}")
            assert (await feed.until("call")).data["rollout_id"] == "anns"


async def test_a_feed_does_not_hold_up_the_end_of_the_proxy(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.session.get(f"{system.url}/feed") as answer:
        await answer.content.readline()
        system.stop()
        async with asyncio.timeout(3):  # the proxy would wait for `proxy.stop_timeout_s`
            await answer.content.read()
        assert answer.content.at_eof()


async def test_reading_takes_no_place_of_a_keys_requests_at_once(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["key"], limits={"concurrent": 1}) as system:
        key = {"Authorization": "Bearer key"}
        async with reading(system, **key) as one, reading(system, **key) as other:
            assert [(await one.next()).kind, (await other.next()).kind] == [None, None]
            assert {(await system.call("GET", "/status", **key))[0] for _ in range(3)} == {200}
            assert (await system.chat("r1", **key))[0] == 200


async def test_a_feed_says_nothing_more_once_its_key_is_revoked(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["key"]) as system, system.store() as store:
        stored, _ = await store.keys.create("ann", "agent", Limits(), recording=True)
        ann, key = {"Authorization": f"Bearer {stored}"}, {"Authorization": "Bearer key"}
        async with asyncio.timeout(10):
            while (await system.call("GET", "/rollouts", **ann))[0] != 200:
                await asyncio.sleep(0.05)
        async with reading(system, **ann) as feed:
            await feed.next()
            await store.keys.revoke("ann")
            async with asyncio.timeout(10):
                while (await system.call("GET", "/rollouts", **ann))[0] != 401:
                    await asyncio.sleep(0.01)
            await system.chat("after", **key)
            rest = await feed.rest()
        assert b"after" not in rest and b"a valid API key is needed" in rest


@pytest.mark.sqlite
async def test_many_feeds_look_at_the_store_as_often_as_one(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, quick = 0, SqliteDatabase.quick

    async def counted(database: SqliteDatabase, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        return await quick(database, *args)

    monkeypatch.setattr(SqliteDatabase, "quick", counted)
    async with running(tmp_path) as system, AsyncExitStack() as stack:
        found = []
        for feeds in (1, 40):
            readers = [await stack.enter_async_context(reading(system)) for _ in range(feeds)]
            for reader in readers:
                await reader.next()
            before = looks
            await asyncio.sleep(2)
            found.append(looks - before)
        assert found[1] < 3 * found[0]
        await system.chat("r1")
        for reader in readers:
            await reader.until("call", rollout_id="r1")
