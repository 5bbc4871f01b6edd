"""A store on a PostgreSQL server: opened by several, held alone by one, and a server that goes away meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import ConfigError, NotFound, StoreUnavailable
from lightning_proxy.core.records import CallEnd, CallStart, Reward, RolloutName
from lightning_proxy.features.page.feed import FeedEvents
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.conversations import CONVERSATION_ORIGIN, CONVERSATION_POINT
from lightning_proxy.store.database import ConstraintRefused, Database, Transaction
from lightning_proxy.store.opening import open_database, opened
from lightning_proxy.store.retention import fold_counts
from lightning_proxy.store.store import Store
from support.stores import END_LOCKS, Server, postgres_server

AT = "UPDATE policy_log SET at = :at"
COUNTED = "SELECT COUNT(*) AS n FROM rollout_count_changes"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def config(server: Server) -> StoreConfig:
    return StoreConfig(url=server.new_database())


@pytest.fixture
async def database(config: StoreConfig) -> AsyncIterator[Database]:
    async with opened(config) as database:
        yield database


def call_of(rollout_id: str, call_id: str, **request: Any) -> CallStart:
    return CallStart(call_id, RolloutName(rollout_id), "chat/completions", "policy", 0, request, 100.0)


async def test_to_look_at_a_store_writes_nothing(config: StoreConfig) -> None:
    with pytest.raises(StoreUnavailable, match="it is empty"):
        await open_database(config, to_write=False)
    async with opened(config) as database:
        await Store(database).rollouts.open([(RolloutName("r"), "hash")], {})
    async with opened(config, to_write=False) as database:
        assert (await Store(database).rollouts.get("r")).rollout_id == "r"
        assert await FeedEvents(database).newest() == 0
        with pytest.raises(StoreUnavailable, match="read-only"):
            await database.commit([(AT, [{"at": 1.0}])])


async def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    config = StoreConfig(url="postgresql://me:secret@127.0.0.1:1/db", busy_timeout_s=1)
    with pytest.raises(StoreUnavailable, match="postgresql://127.0.0.1:1/db cannot be opened") as refused:
        await open_database(config)
    assert "secret" not in str(refused.value)


async def test_without_asyncpg_one_line_says_what_to_install(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("lightning_proxy.store.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(StoreUnavailable, match=r"needs asyncpg: pip install 'lightning-proxy\[postgres\]'"):
        await open_database(config)


def test_what_needs_a_file_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a store that is a file"):
        _ = StoreConfig(url="postgresql://me:secret@h/db").path
    with pytest.raises(ValueError, match="PostgreSQL has retention.max_age_days"):
        StoreConfig.model_validate({"url": "postgresql://h/db", "retention": {"max_gib": 1}})


async def test_a_write_that_fails_leaves_nothing_behind_and_the_next_one_is_done(database: Database) -> None:
    async def fails(db: Transaction) -> None:
        await db.all(AT, {"at": 1.0})
        raise ValueError

    with pytest.raises(ValueError):
        await database.write(fails)
    with pytest.raises(ConstraintRefused):
        await database.commit([(AT, [{"at": 1.0}]), (AT, [{"at": None}])])
    await database.commit([("INSERT INTO policy_log (version, at) VALUES (0, 3)", [{}])])
    assert [row["at"] for row in await database.all("SELECT at FROM policy_log ORDER BY n")] == [0.0, 3.0]


async def test_a_write_whose_caller_is_gone_ends(database: Database) -> None:
    async def slow(db: Transaction) -> None:
        await db.all(AT, {"at": 1.0})
        await db.all("SELECT pg_sleep(0.2)::TEXT")

    leaving = asyncio.create_task(database.write(slow))
    await asyncio.sleep(0.1)
    leaving.cancel()
    await database.write(lambda db: db.all("UPDATE policy_log SET at = at + 2"))
    assert [row["at"] for row in await database.all("SELECT at FROM policy_log")] == [3.0]


async def test_transactions_that_wait_for_each_other_are_both_done(database: Database) -> None:
    await database.commit([("INSERT INTO policy_log (version, at) VALUES (0, 0)", [{}])])
    first, second = [row["n"] for row in await database.all("SELECT n FROM policy_log ORDER BY n")]
    add = "UPDATE policy_log SET at = at + 1 WHERE n = :n"
    wait = ("SELECT pg_sleep(0.1)", [{}])
    one, two = (add, [{"n": first}]), (add, [{"n": second}])
    await asyncio.gather(database.commit([one, wait, two]), database.commit([two, wait, one]))
    assert [row["at"] for row in await database.all("SELECT at FROM policy_log")] == [2.0, 2.0]


async def test_versions_that_are_promoted_at_once_leave_one_live(config: StoreConfig) -> None:
    async with opened(config) as one, opened(config) as two:
        made = [await Store(one).versions.new("merged", step, {}) for step in range(1, 9)]
        for version in made:
            await Store(one).versions.saved(version, f"v{version}", None)
        for _ in range(5):
            await asyncio.gather(*(Store((one, two)[v % 2]).versions.set_live(v) for v in made))
            log = await one.all("SELECT version FROM policy_log ORDER BY n DESC LIMIT 1")
            live = [v.version for v in await Store(one).versions.all() if v.status == "live"]
            assert live == [row["version"] for row in log]


async def test_one_process_at_a_time_does_a_work(config: StoreConfig) -> None:
    async with opened(config) as one, opened(config) as two:
        async with one.lock("keeper") as first, two.lock("keeper") as second, two.lock("ender") as other:
            assert (first, second, other) == (True, False, True)
        async with two.lock("keeper") as third:
            assert third


async def test_who_loses_the_lock_of_a_work_stops_before_another_begins(server: Server, config: StoreConfig) -> None:
    begun, ended = asyncio.Event(), False

    async def holder(database: Database) -> None:
        nonlocal ended
        async with database.lock("trainer") as ours:
            assert ours
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended = True

    async with opened(config) as one, opened(config) as two:
        holding = asyncio.create_task(holder(one))
        await begun.wait()
        async with two.lock("trainer") as second:
            assert not second
        await two.all(END_LOCKS)
        with pytest.raises(StoreUnavailable, match="the lock of the trainer"):
            await holding
        assert ended
        async with two.lock("trainer") as second:
            assert second
        async with one.lock("trainer") as first:
            assert first


async def test_what_was_begun_alone_is_not_written_once_the_lock_is_lost(config: StoreConfig) -> None:
    async with opened(config) as database:

        async def work(db: Transaction) -> None:
            await db.all(AT, {"at": 1.0})
            await database.all(END_LOCKS)
            await asyncio.sleep(0.1)

        with pytest.raises(StoreUnavailable, match="the lock of the trainer"):
            async with database.lock("trainer"):
                await database.write(work)
        await database.write(lambda db: db.all("SELECT 1"))  # after it
        assert [row["at"] for row in await database.all("SELECT at FROM policy_log")] == [0.0]


async def test_a_cut_way_to_the_lock_is_noticed(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lightning_proxy.store.postgres.database"], "BEAT_S", 0.1)
    async with opened(config) as database:
        with pytest.raises(StoreUnavailable, match="the lock of the keeper"):
            async with database.lock("keeper"):
                (holder,) = await database.all(END_LOCKS.replace("pg_terminate_backend(pid)", "pid"))
                os.kill(holder["pid"], signal.SIGSTOP)  # it is there, and says nothing
                try:
                    await asyncio.sleep(20)
                finally:
                    os.kill(holder["pid"], signal.SIGCONT)


async def test_recorders_of_the_same_rollouts_and_prompts_never_wait_for_each_other_in_a_circle(
    server: Server, config: StoreConfig
) -> None:
    before = (server.directory / "log").read_text().count("deadlock detected")

    async def calls(recorder: Recorder, name: str) -> None:
        picks = random.Random(name)
        for i in range(12):
            call_id, rollout_id = f"{name}-{i}", f"r{picks.randrange(12)}"
            await recorder.start(call_of(rollout_id, call_id, n=i))
            said = {"call_id": call_id, "rollout_id": rollout_id, "at": float(i)}
            places = picks.sample([bytes([n]) * 16 for n in range(12)], 6)
            points = [(CONVERSATION_POINT, said | {"digest": b"p" + digest}) for digest in places]
            origins = [(CONVERSATION_ORIGIN, said | {"digest": b"o" + digest}) for digest in places[::-1]]
            await recorder.end(CallEnd(call_id, rollout_id, "ok", {"id": "x"}, 200), [*points, *origins])

    async def proxy(name: str) -> None:
        async with opened(config) as database, Recorder(Store(database), merged=False) as recorder:
            await asyncio.gather(*(calls(recorder, f"{name}{i}") for i in range(24)))

    await asyncio.gather(*map(proxy, "abc"))
    assert (server.directory / "log").read_text().count("deadlock detected") == before
    async with opened(config) as database:
        assert sum([(await Store(database).rollouts.get(f"r{i}")).calls for i in range(12)]) == 3 * 24 * 12


async def test_several_trainers_never_claim_the_same_step(config: StoreConfig) -> None:
    async with opened(config) as one, opened(config) as two:
        steps = await asyncio.gather(*(Store(database).steps.claim([], 0) for database in (one, two) * 10))
    assert sorted(steps) == list(range(1, 21))


async def test_counts_stay_what_they_are_when_they_are_summed_up(database: Database) -> None:
    store = Store(database)
    for i in range(5):
        await store.rollouts.open([(RolloutName(f"r{i}"), f"hash {i}")], {})
    await store.rollouts.end("r0", "failed", None)
    before = await store.rollouts.counts()
    await database.write(fold_counts)
    assert before == await store.rollouts.counts() == {("train", "running"): 4, ("train", "failed"): 1}
    assert (await database.all(COUNTED))[0]["n"] == 2


async def test_a_feed_misses_nothing_that_is_committed_late(config: StoreConfig) -> None:
    async with opened(config) as database, opened(config) as other:
        store, feed = Store(database), FeedEvents(database)
        await store.rollouts.open([(RolloutName("r"), "hash")], {})
        started = asyncio.Event()

        async def late(db: Transaction) -> None:
            await db.all("INSERT INTO rewards (rollout_id, name, value, final, created_at) VALUES ('r', 'n', 1, 0, 0)")
            started.set()
            await db.all("SELECT pg_sleep(0.3)::TEXT")

        writing = asyncio.create_task(other.write(late))
        await started.wait()
        await database.commit([("UPDATE rollouts SET status = 'failed'", [{}])])
        cursor = await feed.newest()
        await writing
        assert await feed.newest() > cursor
        happened, _ = await feed.after(cursor, 10)
        assert [(one.kind, one.data["rollout_id"]) for one in happened] == [("reward", "r")]


async def test_what_no_text_of_the_server_can_hold_is_recorded_all_the_same(database: Database) -> None:
    text = "a\0ü\ud800"
    async with Recorder(Store(database), merged=False) as recorder:
        start = call_of("r", "c", messages=[])._replace(model=text)
        await recorder.start(start)
        await recorder.end(CallEnd("c", "r", "ok", {"id": "x"}, 200))
    (call,) = await Store(database).calls.of("r")
    assert call.model is not None and call.model == text.replace("\0", "?").replace("\ud800", "?")


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_commit_whose_answer_is_lost_is_looked_for(
    database: Database, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    asyncpg = pytest.importorskip("asyncpg")
    execute, cut = asyncpg.Connection.execute, False

    async def cutting(connection: Any, sql: str, *args: Any, **kwargs: Any) -> str:
        nonlocal cut
        if not cut or sql != "COMMIT":
            done: str = await execute(connection, sql, *args, **kwargs)
            return done
        cut = False
        if arrives:
            await execute(connection, sql)
        connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("the connection was closed in the middle of an operation")

    monkeypatch.setattr(asyncpg.Connection, "execute", cutting)
    async with Recorder(Store(database), merged=False) as recorder:
        for record in (
            lambda: recorder.start(call_of("r", "c", n=1)),
            lambda: recorder.end(CallEnd("c", "r", "ok", {"id": "x"}, 200)),
        ):
            cut = True
            if arrives:
                await record()
                continue
            with pytest.raises(StoreUnavailable, match="whether it was recorded is not known"):
                await record()
            await record()
    (call,) = await Store(database).calls.of("r")
    assert call.status == "ok" and (await Store(database).rollouts.get("r")).calls == 1


async def test_a_server_that_is_killed_under_load_loses_nothing_that_was_acknowledged() -> None:
    with postgres_server(fsync="on") as server:
        config = StoreConfig(url=server.new_database(), busy_timeout_s=20)
        acknowledged: set[str] = set()
        unavailable = 0
        async with opened(config) as database, Recorder(Store(database), merged=False) as recorder:
            stop = asyncio.Event()

            async def agent(name: str) -> None:
                nonlocal unavailable
                number = 0
                while not stop.is_set():
                    call_id, number = f"{name}-{number}", number + 1
                    try:
                        await recorder.start(call_of(name, call_id, n=number))
                        await recorder.end(CallEnd(call_id, name, "ok", {"id": call_id}, 200))
                        await Store(database).rewards.post([Reward(name, 1.0, call_id=call_id, final=False)])
                    except (StoreUnavailable, NotFound):
                        unavailable += 1
                        continue
                    acknowledged.add(call_id)

            agents = [asyncio.create_task(agent(f"r{i}")) for i in range(8)]
            for _ in range(3):
                before = len(acknowledged)
                while len(acknowledged) < before + 50:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            stop.set()
            await asyncio.gather(*agents)
            rows = await database.all("SELECT call_id FROM calls WHERE status = 'ok'")
            kept = {row["call_id"] for row in rows}
            rewarded = {row["call_id"] for row in await database.all("SELECT call_id FROM rewards")}
        assert len(acknowledged) >= 150 and acknowledged <= kept and acknowledged <= rewarded
