"""`store migrate`: the whole store in the other database, or nothing."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.migrate import ServerStore, all_tables, file_to_read, new_file
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.errors import LightningError, StoreUnavailable
from lightning_proxy.core.records import CallEnd, CallStart, Reward, RolloutName
from lightning_proxy.features.page.feed import FeedEvents
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database, Feed
from lightning_proxy.store.opening import open_database, opened
from lightning_proxy.store.store import Store
from support.command_line import lightning
from support.stores import Server, postgres_server

# What the recorder's rows alone do not reach. Both databases take these statements.
MORE = """
UPDATE calls SET prompt_ids = :blob, logprobs = :blob, latency_ms = 0.1 WHERE call_id = 'b-1'
UPDATE calls SET usage = '{"a": "\\u0000ü"}' WHERE call_id = 'b-1'
INSERT INTO policy_versions (version, status, publish, created_at) VALUES (7, 'ready', 'lora', 1.5)
INSERT INTO policy_log (version, at) VALUES (7, 1732000000.123456)
UPDATE policy_versions SET verified = 1 WHERE version = 7
INSERT INTO promotions (version, against, status, began_at) VALUES (7, 0, 'testing', 1.5)
INSERT INTO promotion_rollouts VALUES ('b', 1, NULL, 0, 7, 1, '', 1)
INSERT INTO steps (step, status, base, created_at) VALUES (3, 'trained', 7, 2)
UPDATE rollouts SET step = 3, group_id = 1, reward = 0.1 WHERE rollout_id = 'a'
UPDATE rollouts SET alias_model = 'gpt' WHERE rollout_id = 'a'
INSERT INTO keys (key_id, key_hash, name, role, created_at) VALUES ('k', 'h', 'Ännchen', 'agent', 1)
INSERT INTO keys (key_id, key_hash, name, role, created_at, revoked_at) VALUES ('K', 'H', 'z', 'admin', 1, 2)
INSERT INTO rollout_keys (key_hash, rollout_id, key_id) VALUES ('rh', 'a', 'k')
INSERT INTO large_requests VALUES ('b-1', '{"large": "ß"}') ON CONFLICT DO NOTHING
INSERT INTO tool_calls VALUES ('a', 'a-0', 0, 'tc', 'search', '{}', NULL, 0, :blob)
INSERT INTO events (rollout_id, seq, kind, value, created_at) VALUES ('a', 0, 'note', '"n"', 3)
INSERT INTO idempotency VALUES ('b', 'x', '{}', 1)
INSERT INTO idempotency VALUES ('B', 'x', '{}', 1)
INSERT INTO conversation_points VALUES (:blob, NULL, 1)
INSERT INTO conversation_tips VALUES (:blob, 1.25, 'a-0', 'a', :blob)
INSERT INTO probes VALUES (7, 'm', '[]', 1, NULL)
INSERT INTO reward_function VALUES ('module:f')
INSERT INTO publishing VALUES (1, 'lora', 'trainer', 1)
INSERT INTO call_credit VALUES (1, 0, 3, 0.5, -0.25, NULL, 'opened')
INSERT INTO prompts VALUES ('p', NULL, 'system', 1)
INSERT INTO prompt_versions (name, version, text, created_at) VALUES ('p', 1, 'Be brief.', 1)
INSERT INTO prompt_log (name, version) VALUES ('p', 1)
INSERT INTO rollout_prompts VALUES ('a', 'p', 1)
INSERT INTO call_prompts VALUES ('a-0', 'p', 1, '[]', NULL, 'Hi')
UPDATE rollouts SET status = 'completed' WHERE rollout_id = 'c'
DELETE FROM rollouts WHERE rollout_id = 'd'
INSERT INTO evaluations (version, step, began_at) VALUES (7, 3, 1)
INSERT INTO rewarder_spoken SELECT n, 'judge' FROM awaiting_rewards
INSERT INTO rewarder_answers VALUES ('q', 1, 'yes')
INSERT INTO rewarder_spent VALUES ('judge', 12, 0.5)
"""


async def fill(database: Database, *, calls: int = 3, bytes_each: int = 10) -> None:
    """Record rollouts a to e, with calls whose order of recording is not that of their ids, and rows in all tables."""
    store = Store(database)
    async with Recorder(store, merged=False) as recorder:
        for rollout in "bacde":
            for seq in reversed(range(calls)):
                request = {"messages": [{"role": "user", "content": f"{seq} é" + "x" * bytes_each}]}
                name = RolloutName(rollout, agent=None if rollout == "c" else f"agent {rollout}")
                call_id = f"{rollout}-{seq}"
                start = CallStart(call_id, name, "chat/completions", "policy", 0, request, 100.5)
                await recorder.start(start)
                await recorder.end(CallEnd(call_id, rollout, "ok", {"id": "x"}, 200))
    await store.rewards.post([Reward("a", 0.1), Reward("b", 2.0, call_id="b-1", final=False)])
    await database.commit([(sql, [{"blob": bytes(range(256))}]) for sql in MORE.strip().splitlines()])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def on_server(server: Server) -> StoreConfig:
    return StoreConfig(url=server.new_database())


def in_file(path: Path) -> StoreConfig:
    return StoreConfig(url=f"sqlite:///{path}")


@pytest.fixture
def file(tmp_path: Path) -> StoreConfig:
    return in_file(tmp_path / "s.db")


async def migrate(source: StoreConfig, target: StoreConfig, code: int = 0) -> str:
    """Return what it says of a problem."""
    done = await asyncio.to_thread(lightning, "store", "migrate", source.url, target.url)
    assert done.returncode == code, done
    return done.stderr


@contextmanager
def moving(source: StoreConfig, target: StoreConfig) -> Iterator[subprocess.Popen[str]]:
    """A move that has come to what is large."""
    command = [sys.executable, "-m", "lightning_proxy.cli", "store", "migrate", source.url, target.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("calls:"):
                break
        yield process


async def rows_of(config: StoreConfig) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables, each ordered by its key's values in Python."""
    found = {}
    async with opened(config, to_write=False) as database:
        for table in all_tables():
            rows = [dict(row) for row in await database.all(f"SELECT * FROM {table.name}")]
            found[table.name] = sorted(rows, key=lambda row, key=table.key: [row[column] for column in key])  # type: ignore[misc]
    return found


async def filled(config: StoreConfig, **more: int) -> None:
    async with opened(config) as database:
        await fill(database, **more)


async def goes_on(config: StoreConfig, name: str) -> None:
    """What is recorded after a move has numbers above the highest of what was moved, and is counted."""
    async with opened(config) as database:
        store, feed = Store(database), FeedEvents(database)
        counts, newest = await store.rollouts.counts(), await feed.newest()
        (highest,) = await database.all("SELECT MAX(n) AS rollout FROM rollouts")
        await store.rollouts.open([(RolloutName(name), name)], {})
        await store.rewards.post([Reward(name, 1.0, final=False)])
        await database.commit([("INSERT INTO prompt_log (name, version) VALUES ('p', 1)", [{}])])
        await Feed(database).newest()
        (row,) = await database.all("SELECT MAX(n) AS rollout FROM rollouts")
        assert row["rollout"] == highest["rollout"] + 1
        happened, _ = await feed.after(newest, 10)
        assert [one.kind for one in happened] == ["rollout", "reward"]
        counts[("train", "running")] += 1
        assert await store.rollouts.counts() == counts


async def test_a_store_is_the_same_after_it_was_moved_to_a_server_and_back_and_goes_on_in_both(
    on_server: StoreConfig, tmp_path: Path
) -> None:
    first, last = in_file(tmp_path / "first.db"), in_file(tmp_path / "last.db")
    await filled(first)
    before = await rows_of(first)
    assert all(before.values()), [table for table, rows in before.items() if not rows]
    content = (tmp_path / "first.db").read_bytes()
    await migrate(first, on_server)
    assert (tmp_path / "first.db").read_bytes() == content and not (tmp_path / "first.db-wal").exists()
    assert await rows_of(on_server) == before
    await goes_on(on_server, "new")
    before = await rows_of(on_server)
    await migrate(on_server, last)
    assert await rows_of(last) == before
    with closing(sqlite3.connect(tmp_path / "first.db")) as old, closing(sqlite3.connect(tmp_path / "last.db")) as new:
        for asked in ("SELECT type, name, sql FROM sqlite_master ORDER BY name", "PRAGMA auto_vacuum"):
            assert new.execute(asked).fetchall() == old.execute(asked).fetchall()
    await goes_on(last, "newer")


async def test_what_a_server_has_not_numbered_yet_gets_its_numbers(on_server: StoreConfig, file: StoreConfig) -> None:
    async with opened(on_server) as database:
        await Store(database).rollouts.open([(RolloutName("r"), "hash")], {})
        await Feed(database).newest()
        await Store(database).rollouts.end("r", "failed", None)
        await Store(database).rewards.post([Reward("r", 1.0)])
        waiting = [row["kind"] for row in await database.all("SELECT kind FROM feed_in ORDER BY n")]
        assert waiting == ["rollout", "group", "reward", "group"]
        await migrate(on_server, file)
        assert [row["kind"] for row in await database.all("SELECT kind FROM feed_in ORDER BY n")] == waiting
    feed = (await rows_of(file))["feed"]
    kinds = ("rollout", "rollout", "group", "reward", "group")
    assert [(row["n"], row["kind"], row["ref"]) for row in feed] == [(n, kind, "1") for n, kind in enumerate(kinds, 1)]


async def test_a_store_is_moved_only_to_where_there_is_none_and_one_at_a_time(
    on_server: StoreConfig, file: StoreConfig, tmp_path: Path
) -> None:
    other = in_file(tmp_path / "other.db")
    assert "there is no store at" in await migrate(file, on_server, 1)
    await filled(on_server)
    (tmp_path / "other.db-wal").write_bytes(b"of another")
    await migrate(on_server, other, 1)
    assert not (tmp_path / "other.db").exists()
    async with new_file(file):
        with pytest.raises(LightningError, match="another process is moving a store"):
            async with new_file(file):
                pass


async def test_what_another_process_records_meanwhile_is_not_moved(on_server: StoreConfig, file: StoreConfig) -> None:
    async with opened(file) as database:
        await fill(database)
        moving = asyncio.create_task(migrate(file, on_server))
        number = 0
        while not moving.done():
            number += 1
            await Store(database).rollouts.open([(RolloutName(f"later {number}"), f"hash {number}")], {})
            await asyncio.sleep(0.001)
        await moving
    here, there = (await rows_of(file))["rollouts"], await rows_of(on_server)
    assert there["rollouts"] == here[: len(there["rollouts"])]
    assert len(there["rollouts"]) < len(here)
    assert sum(row["rollouts"] for row in there["rollout_count_changes"]) == len(there["rollouts"])


async def test_a_file_that_nobody_had_open_and_that_is_written_to_meanwhile_is_not_moved(file: StoreConfig) -> None:
    await filled(file)
    with pytest.raises(LightningError, match="was written to during the copy"):
        async with file_to_read(file), opened(file) as database:
            await Store(database).rollouts.open([(RolloutName("later"), "hash")], {})
            await database.checkpoint()


async def test_a_text_that_the_server_cannot_hold_is_moved_as_the_server_would_record_it(
    on_server: StoreConfig, file: StoreConfig
) -> None:
    async with opened(file) as database:
        await fill(database)
        await database.commit([("UPDATE calls SET error = :error WHERE call_id = 'a-0'", [{"error": "a\0b"}])])
    await migrate(file, on_server)
    assert [row["error"] for row in (await rows_of(on_server))["calls"] if row["call_id"] == "a-0"] == ["a?b"]


@pytest.mark.parametrize("back", [False, True])
async def test_a_move_that_is_killed_leaves_nothing_and_is_done_again(
    on_server: StoreConfig, file: StoreConfig, back: bool
) -> None:
    source, target = (on_server, file) if back else (file, on_server)
    await filled(source, calls=300, bytes_each=20_000)
    with moving(source, target) as process:
        await asyncio.sleep(0.05)
        process.kill()
        assert process.stdout is not None and "large_requests:" not in process.stdout.read()
    assert process.returncode == -9
    if back:
        assert not file.path.exists()
    else:
        with pytest.raises(StoreUnavailable, match="it is empty"):
            await open_database(target, to_write=False)
    await migrate(source, target)
    assert not [one.name for one in file.path.parent.iterdir() if ".part" in one.name]
    assert len((await rows_of(target))["calls"]) == 1200


async def test_a_server_that_ends_meanwhile_undoes_the_move(file: StoreConfig) -> None:
    await filled(file, calls=300, bytes_each=20_000)
    with postgres_server() as server:
        url = server.new_database()
        with moving(file, StoreConfig(url=url)) as process:
            server.kill()
            _, said = process.communicate(timeout=20)
        assert process.returncode == 1 and "was not moved" in said and said.count("\n") == 1, said
        server.start()
        await migrate(file, StoreConfig(url=url))


async def test_a_row_that_is_read_back_differently_undoes_the_move(
    on_server: StoreConfig, file: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(file)
    fill_table = ServerStore.fill

    async def wrongly(self: Any, table: Any, rows: Any) -> None:
        await fill_table(self, table, rows)
        if table.name == "rewards":
            await self._connection.execute("UPDATE rewards SET value = 3 WHERE reward_id = 1")

    monkeypatch.setattr(ServerStore, "fill", wrongly)
    told = "a row of rewards differs in the copy: reward_id 1. Nothing was moved"
    assert told in await migrate(file, on_server, 1)
    with pytest.raises(StoreUnavailable, match="it is empty"):
        await open_database(on_server, to_write=False)
