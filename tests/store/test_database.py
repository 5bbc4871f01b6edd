"""The store's file: its owner, one writer, no lock that stalls the event loop; a file that is moved or damaged."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from contract.system import in_this_process, wait_until
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import StoreUnavailable
from lightning_proxy.core.records import RolloutName
from lightning_proxy.store import database as databases
from lightning_proxy.store.database import ConstraintRefused, Database, Transaction
from lightning_proxy.store.opening import opened
from lightning_proxy.store.sqlite import database as files
from lightning_proxy.store.sqlite.database import SqliteDatabase
from lightning_proxy.store.sqlite.file import copy_store
from lightning_proxy.store.store import Store
from support.stores import store_url

AT = "UPDATE policy_log SET at = :at"
INSERT = "INSERT INTO idempotency (key, body_hash, answer, created_at) VALUES (:key, 'h', :answer, 0)"


def config_of(directory: Path, **more: float | str) -> StoreConfig:
    return StoreConfig.model_validate({"url": f"sqlite:///{directory}/store.db", **more})


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    database = await SqliteDatabase.open(config_of(tmp_path), to_write=True)
    yield database
    await database.close()


@pytest.fixture
async def either(tmp_path: Path) -> AsyncIterator[Database]:
    """SQLite, or with `--store postgres` PostgreSQL."""
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield database


def test_a_process_that_did_not_close_its_store_ends(tmp_path: Path) -> None:
    script = f"""
import asyncio
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.store.opening import open_database

async def main():
    database = await open_database(StoreConfig(url="sqlite:///{tmp_path}/store.db"))
    await database.all("SELECT 1")
    raise SystemExit(3)

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60).returncode == 3


async def test_a_commit_is_synced_as_the_configuration_says(tmp_path: Path) -> None:
    for synchronous, level in (("normal", 1), ("full", 2)):
        async with opened(config_of(tmp_path, synchronous=synchronous)) as database:
            (row,) = await database.write(lambda db: db.all("PRAGMA synchronous"))
            assert row["synchronous"] == level


async def test_what_is_written_at_once_and_in_the_thread_is_written_in_turn(database: SqliteDatabase) -> None:
    async def append(db: Transaction) -> int:
        await db.all("INSERT INTO policy_log (version, at) VALUES (0, 1)")
        time.sleep(0.002)  # others come meanwhile
        (row,) = await db.all("SELECT COUNT(*) AS n FROM policy_log WHERE at = 1")
        return int(row["n"])

    one = ("INSERT INTO policy_log (version, at) VALUES (0, :at)", [{"at": 2}])
    done = await asyncio.gather(*(database.write(append) if i % 2 else database.commit([one]) for i in range(40)))
    assert [count for count in done if count is not None] == list(range(1, 21))
    assert (await database.all("SELECT COUNT(*) AS n FROM policy_log WHERE at = 2"))[0]["n"] == 20


async def test_a_write_whose_caller_is_gone_ends_before_the_next_one(either: Database) -> None:
    async def slow(db: Transaction) -> None:
        await db.all(AT, {"at": 1.0})
        time.sleep(0.1)

    leaving = asyncio.create_task(either.write(slow))
    await asyncio.sleep(0.02)
    leaving.cancel()
    await either.write(lambda db: db.all("UPDATE policy_log SET at = at + 2"))
    assert [row["at"] for row in await either.all("SELECT at FROM policy_log")] == [3.0]


async def test_a_write_that_fails_leaves_nothing_behind_and_the_next_one_is_done(either: Database) -> None:
    async def fails(db: Transaction) -> None:
        await db.all(AT, {"at": 1.0})
        raise ValueError

    with pytest.raises(ValueError):
        await either.write(fails)
    with pytest.raises(ConstraintRefused):
        await either.commit([(AT, [{"at": 1.0}]), (AT, [{"at": None}])])
    await either.commit([("INSERT INTO policy_log (version, at) VALUES (0, 3)", [{}])])
    assert [row["at"] for row in await either.all("SELECT at FROM policy_log ORDER BY n")] == [0.0, 3.0]


async def test_a_store_that_another_process_has_locked_does_not_stall_the_event_loop(tmp_path: Path) -> None:
    async with opened(config_of(tmp_path, busy_timeout_s=0.5)) as database:
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = asyncio.create_task(database.commit([(AT, [{"at": 1}])]))
            rounds = 0
            while not writing.done():
                await asyncio.sleep(0.005)
                assert await database.quick("SELECT at FROM policy_log") is not None
                assert len(await database.all("SELECT at FROM policy_log")) == 1
                rounds += 1
            with pytest.raises(StoreUnavailable, match="cannot be written: database is locked; nothing was recorded"):
                await writing
            assert rounds > 1
        await database.commit([(AT, [{"at": 2}])])


async def test_the_log_stays_bounded(database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_proxy.store.sqlite.database.LONG_LOG", 2**20)
    for n in range(60):
        await database.commit([(INSERT, [{"key": f"{n}", "answer": "x" * 200_000}])], 200_000)
        if database._checkpoint is not None:
            await database._checkpoint
    assert Path(f"{database.path}-wal").stat().st_size < 4_000_000


async def test_the_log_is_cut_off_also_where_a_checkpoint_is_under_way(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Path(f"{database.path}-wal")
    for n in range(30):
        await database.commit([(INSERT, [{"key": f"{n}", "answer": "secret" * 100_000}])])
    monkeypatch.setattr("lightning_proxy.store.sqlite.database.CHECKPOINT_EVERY", 1)
    await database.commit([(AT, [{"at": 1.0}])])
    await asyncio.sleep(0.002)
    assert log.stat().st_size > 10_000_000
    await database.forget_deleted()
    assert log.stat().st_size == 0


async def test_only_its_owner_reads_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with opened(StoreConfig(url=f"sqlite:///{path}")) as database:
        await Store(database).rollouts.open([(RolloutName("r"), "hash")], {})
        assert {file.name: file.stat().st_mode & 0o077 for file in tmp_path.iterdir()} == {
            "s.db": 0, "s.db-wal": 0, "s.db-shm": 0
        }  # fmt: skip
    copy_store(path, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600


async def test_a_full_disk_is_one_line_and_is_not_ready_until_there_is_room(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    large = [(INSERT, [{"key": "large", "answer": "x" * 100_000}])]
    await database.commit([(AT, [{"at": 1.0}])])
    database._here.execute("PRAGMA max_page_count = 1")  # no page more
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="disk is full"):
            await database.commit(large)
    with pytest.raises(StoreUnavailable, match="the newest record could not be written: .* is full"):
        await database.require_writable()
    assert [record.message for record in caplog.records] == [
        "records cannot be written; requests that need a record are refused (503): database or disk is full"
    ]
    monkeypatch.setattr(databases, "REFUSED_S", 0.0)
    monkeypatch.setattr(files, "ROOM", 2**62)  # as if the disk had less
    with pytest.raises(StoreUnavailable, match="could not be written"):
        await database.require_writable()
    monkeypatch.setattr(files, "ROOM", 1)
    await database.require_writable()
    assert caplog.records[-1].message == "records can be written again", "a probe sees it, where no call comes"
    database._here.execute("PRAGMA max_page_count = 1000000")
    await database.commit(large)


# A file that is removed, moved or replaced while the proxy serves

REWARD = {"rollout_id": "before", "reward": 1.0, "final": False}


@pytest.mark.sqlite
@pytest.mark.parametrize("how", ["moved", "log removed", "emptied"])
def test_nothing_is_acknowledged_that_no_file_will_have(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, away = tmp_path / "store.db", tmp_path / "away.db"
    told = "it has 0 bytes" if how == "emptied" else "was removed or replaced"
    with in_this_process(tmp_path) as proxy:
        assert proxy.chat("before").status == 200
        match how:
            case "moved":
                file.rename(away)
            case "emptied":
                file.write_bytes(b"")
            case "log removed":
                (tmp_path / "store.db-wal").unlink()
        for answer in (proxy.chat("before"), proxy.chat("after")):
            assert answer.status == 503 and told in answer.error["message"]
        assert proxy.post("/reward", REWARD).status == 503
        ready = proxy.call("GET", "/readyz")
        assert ready.status == 503 and told in ready.json["store"]
        assert caplog.text.count("records cannot be written") == 1
        if how == "moved":
            away.rename(file)
            assert proxy.chat("again").status == 200, "it has its place again"
            assert caplog.text.count("records can be written again") == 1


@pytest.mark.sqlite
def test_a_store_that_is_damaged_or_lost_its_content_is_told_by_readyz_and_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with in_this_process(tmp_path) as proxy:
        assert proxy.chat("before").status == 200
        assert "damaged" not in proxy.get("/readyz")["store"]
    file = tmp_path / "store.db"
    with closing(sqlite3.connect(file)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'events'").fetchone()
    whole = file.read_bytes()
    for content, told, logged in (
        (whole[: (page - 1) * 4096] + b"\xff" * 4096 + whole[page * 4096 :], "damaged", "store.db is damaged"),
        (b"", "it had 0 bytes", "it had 0 bytes"),
    ):
        file.write_bytes(content)
        with in_this_process(tmp_path) as proxy:
            wait_until(lambda told=told: told in proxy.call("GET", "/readyz").json["store"], 20, told)
            assert proxy.get("/readyz")["status"] == "degraded", "calls are answered and recorded"
        assert logged in caplog.text
