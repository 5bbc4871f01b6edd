"""A store on a PostgreSQL server: its statements, several that open it, and a server that goes away or says nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from contract.system import in_this_process, wait_until
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import StoreUnavailable
from lightning_proxy.core.records import CallEnd, CallStart, RolloutName
from lightning_proxy.features.page.feed import FeedEvents
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.conversations import CONVERSATION_ORIGIN, CONVERSATION_POINT
from lightning_proxy.store.database import Database, Transaction
from lightning_proxy.store.opening import open_database, opened
from lightning_proxy.store.rollouts import ROLLOUT_FILTERS, page_of, page_statement
from lightning_proxy.store.store import Store
from support.stores import END_LOCKS, Server, postgres_server, statements

asyncpg = pytest.importorskip("asyncpg", reason="asyncpg is not installed (the extra `postgres`)")
from lightning_proxy.store.postgres.database import HOLD_ROLLOUTS, RECORDED  # noqa: E402
from lightning_proxy.store.postgres.statements import translated  # noqa: E402

pytestmark = pytest.mark.sqlite  # it brings its own server
PATIENCE_S = 0.5
SOON_S = 30.0  # far less than the 120 s of work that nobody waits for
REWARD = {"rollout_id": "before", "reward": 1.0, "final": False}
AT = "UPDATE policy_log SET at = :at"


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


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def call_of(rollout_id: str, call_id: str, **request: Any) -> CallStart:
    return CallStart(call_id, RolloutName(rollout_id), "chat/completions", "policy", 0, request, 100.0)


async def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    config = StoreConfig(url="postgresql://me:secret@127.0.0.1:1/db", busy_timeout_s=1)
    with pytest.raises(StoreUnavailable, match="postgresql://127.0.0.1:1/db cannot be opened") as refused:
        await open_database(config)
    assert "secret" not in str(refused.value)


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


async def test_one_process_at_a_time_does_a_work_and_who_loses_its_lock_stops_before_another_begins(
    config: StoreConfig,
) -> None:
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
        async with two.lock("trainer") as second, two.lock("another") as other:
            assert (second, other) == (False, True)
        await two.all(END_LOCKS)
        with pytest.raises(StoreUnavailable, match="the trainer lock was lost"):
            await holding
        assert ended
        async with two.lock("trainer") as second:
            assert second
        async with one.lock("trainer") as first:
            assert first


async def test_what_was_begun_alone_is_not_written_once_the_lock_is_lost(database: Database) -> None:
    async def work(db: Transaction) -> None:
        await db.all(AT, {"at": 1.0})
        await database.all(END_LOCKS)
        await asyncio.sleep(0.1)

    with pytest.raises(StoreUnavailable, match="the trainer lock was lost"):
        async with database.lock("trainer"):
            await database.write(work)
    await database.write(lambda db: db.all("SELECT 1"))  # after it
    assert [row["at"] for row in await database.all("SELECT at FROM policy_log")] == [0.0]


async def test_a_cut_way_to_the_lock_is_noticed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lightning_proxy.store.postgres.database"], "BEAT_S", 0.1)
    with pytest.raises(StoreUnavailable, match="the keeper lock was lost"):
        async with database.lock("keeper"):
            (holder,) = await database.all(END_LOCKS.replace("pg_terminate_backend(pid)", "pid"))
            with frozen(holder["pid"]):  # it is there, and says nothing
                await asyncio.sleep(20)


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
            places = picks.sample(range(12), 6)
            points = [(CONVERSATION_POINT, said | {"digest": b"p%d" % n}) for n in places]
            origins = [(CONVERSATION_ORIGIN, said | {"digest": b"o%d" % n}) for n in places[::-1]]
            await recorder.end(CallEnd(call_id, rollout_id, "ok", {"id": "x"}, 200), [*points, *origins])

    async def proxy(name: str) -> None:
        async with opened(config) as database, Recorder(Store(database), merged=False) as recorder:
            await asyncio.gather(*(calls(recorder, f"{name}{i}") for i in range(24)))

    await asyncio.gather(*map(proxy, "abc"))
    assert (server.directory / "log").read_text().count("deadlock detected") == before
    async with opened(config) as database:
        assert sum([(await Store(database).rollouts.get(f"r{i}")).calls for i in range(12)]) == 3 * 24 * 12


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


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_commit_whose_answer_is_lost_is_looked_for(
    database: Database, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
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
            with pytest.raises(StoreUnavailable, match="the data may or may not be recorded"):
                await record()
            await record()
    (call,) = await Store(database).calls.of("r")
    assert call.status == "ok" and (await Store(database).rollouts.get("r")).calls == 1


def test_calls_rewards_and_probes_get_a_503_while_the_server_says_nothing(server: Server, tmp_path: Path) -> None:
    store = {"url": server.new_database(), "busy_timeout_s": PATIENCE_S}
    with in_this_process(tmp_path, store=store) as proxy, ThreadPoolExecutor(16) as threads:
        assert proxy.chat("before").status == 200
        key = proxy.post("/rollouts", {}).json[0]["api_key"]
        proxy.vllm.delay_s = 1.0
        calls = [threads.submit(proxy.chat, "before") for _ in range(2)]
        time.sleep(0.5)
        proxy.vllm.delay_s = 0.0
        with frozen(*server.pids()):
            calls += [threads.submit(proxy.chat, name) for name in ("before", None, *(f"r{n}" for n in range(6)))]
            calls.append(threads.submit(proxy.chat, "by-key", key=key))
            answers = [call.result(SOON_S) for call in calls]
            assert {answer.status for answer in answers} == {503}, answers
            assert proxy.post("/reward", REWARD).status == 503
            ready = proxy.call("GET", "/readyz")
            assert (ready.status, ready.json["status"]) == (503, "not ready")
            assert b"does not answer" in ready.body
            assert b"lightning_store_up 0.0\n" in proxy.call("GET", "/metrics").body
        wait_until(lambda: proxy.chat("after").status == 200, SOON_S, "calls are recorded again")
        assert proxy.post("/reward", REWARD).status == 200


async def test_work_that_nobody_waits_for_has_longer(server: Server) -> None:
    async with opened(StoreConfig(url=server.new_database(), busy_timeout_s=PATIENCE_S)) as database:
        slow = f"SELECT 1 AS n, pg_sleep({3 * PATIENCE_S})::TEXT AS slept"
        assert len(await database.all(slow)) == 1
        await database.write(lambda db: db.all(slow))


async def test_every_statement_of_the_store_is_one_for_postgresql(server: Server, database: Database) -> None:
    pages = {f"page by {name}": page_of([name]) for name in ROLLOUT_FILTERS}
    wanted = {"min_reward": 0.0, "max_reward": 1.0, "since": 0.0, "text": "ä", "prefix": "r"}
    pages["search"] = page_statement({"agent": "a", "status": "ok", "task_id": "t"} | wanted)[0]
    pages["search by text"] = page_statement({"text": "x"})[0]
    wrong = {}
    connection = await asyncpg.connect(database._config.url)  # type: ignore[attr-defined]
    own = {"HOLD_ROLLOUTS": HOLD_ROLLOUTS} | {sql: sql for sql in RECORDED.values()}
    for name, sql in {**dict(statements()), **pages, **own}.items():
        if "sqlite_master" in sql:
            continue
        text, names = translated(sql)
        try:
            prepared = await connection.prepare(text)
            assert len(prepared.get_parameters()) == len(names)
        except asyncpg.PostgresError as error:
            wrong[name] = f"{error}: {text}"
    await connection.close()
    assert wrong == {}
