"""Scripts of side rooms are counted apart from the core's, in both databases, and a store outlives its rooms."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_proxy.commands.moving.move import move
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.errors import StoreUnavailable
from lightning_proxy.proxy.store import scripts
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.sqlite.migrate import FIRST, _statements
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import RolloutName
from support.postgres import Server, postgres_server

pytestmark = pytest.mark.sqlite  # it brings its own server
MIGRATIONS = Path(str(scripts.HOUSE)) / "store"
BOOKS = """
CREATE TABLE books (
    title TEXT PRIMARY KEY,
    rollout_id TEXT REFERENCES rollouts (rollout_id) ON DELETE CASCADE
);
"""
PAGES = "ALTER TABLE books ADD COLUMN pages BIGINT NOT NULL DEFAULT 100;"
INSERT = "INSERT INTO books (title, rollout_id) VALUES ('Emma', 'r')"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    if request.param == "sqlite":
        return StoreConfig(url=f"sqlite:///{tmp_path}/store.db")
    return StoreConfig(url=request.getfixturevalue("server").new_database())


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of rooms, which has none yet."""
    house = tmp_path / "house"
    house.mkdir()
    monkeypatch.setattr(scripts, "ROOMS", house)
    return house


def add(house: Path, number: int, script: str) -> None:
    for database in ("sqlite", "postgres"):
        folder = house / "shelf" / "migrations" / database
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04}_books.sql").write_text(script)


async def books(config: StoreConfig, *, to_write: bool = True) -> list[tuple[object, ...]]:
    async with opened(config, to_write=to_write) as database:
        return [tuple(row) for row in await database.all("SELECT * FROM books")]


async def filled(config: StoreConfig) -> None:
    async with opened(config) as database:
        await Store(database).rollouts.open([(RolloutName("r"), "hash")], {}, None)
        await database.commit([(INSERT, [{}])])


async def test_scripts_of_a_room_run_once_and_are_counted_apart(config: StoreConfig, house: Path) -> None:
    async with opened(config):
        pass  # a store of today
    add(house, 1, BOOKS)
    with pytest.raises(StoreUnavailable, match="an earlier lightning-proxy worked on it last"):
        await books(config, to_write=False)
    await filled(config)
    assert await books(config, to_write=False) == [("Emma", "r")]
    add(house, 2, PAGES)
    assert await books(config) == [("Emma", "r", 100)]
    assert await books(config, to_write=False) == [("Emma", "r", 100)]


async def test_a_store_whose_room_is_gone_opens_and_keeps_its_tables(config: StoreConfig, house: Path) -> None:
    add(house, 1, BOOKS)
    await filled(config)
    shutil.rmtree(house / "shelf")
    for to_write in (True, False):
        assert await books(config, to_write=to_write) == [("Emma", "r")]
    add(house, 1, BOOKS)
    assert await books(config) == [("Emma", "r")]


async def test_a_store_that_a_newer_release_of_a_room_worked_on_is_refused(config: StoreConfig, house: Path) -> None:
    add(house, 1, BOOKS)
    add(house, 2, PAGES)
    await filled(config)
    (house / "shelf/migrations/sqlite/0002_books.sql").unlink()
    (house / "shelf/migrations/postgres/0002_books.sql").unlink()
    for to_write in (True, False):
        with pytest.raises(StoreUnavailable, match="a newer lightning-proxy has worked on it"):
            await books(config, to_write=to_write)


@pytest.mark.parametrize("last", [1, 9])
async def test_a_file_of_an_early_release_opens_with_a_room(tmp_path: Path, house: Path, last: int) -> None:
    config = StoreConfig(url=f"sqlite:///{tmp_path}/store.db")
    with closing(sqlite3.connect(config.path)) as old:
        for script in sorted((MIGRATIONS / "migrations").glob("*.sql"))[:last]:
            for statement in _statements(script.read_text()):
                old.execute(statement)
        old.execute(f"PRAGMA user_version = {FIRST + last}")
        old.commit()
    add(house, 1, BOOKS)
    await filled(config)
    assert await books(config, to_write=False) == [("Emma", "r")]


async def test_a_server_of_its_first_release_opens_with_a_room(server: Server, house: Path) -> None:
    asyncpg = pytest.importorskip("asyncpg")
    config = StoreConfig(url=server.new_database())
    old = await asyncpg.connect(config.url)
    await old.execute("CREATE TABLE lightning_store (version BIGINT NOT NULL); INSERT INTO lightning_store VALUES (10)")
    await old.execute((MIGRATIONS / "postgres/migrations/0010_initial.sql").read_text())
    await old.close()
    add(house, 1, BOOKS)
    await filled(config)
    assert await books(config, to_write=False) == [("Emma", "r")]


async def test_tables_of_rooms_are_moved_to_a_server_and_back(server: Server, tmp_path: Path, house: Path) -> None:
    add(house, 1, BOOKS)
    places = [StoreConfig(url=f"sqlite:///{tmp_path}/{name}.db") for name in ("old", "new")]
    places.insert(1, StoreConfig(url=server.new_database()))
    await filled(places[0])
    for source, target in pairwise(places):
        await move(source, target, Watcher())
        assert await books(target) == [("Emma", "r")]


class Watcher:
    def begins(self, table: str, rows: int) -> None: ...
    def copied(self, rows: int) -> None: ...
    def compared(self, rows: int) -> None: ...
    def ends(self, table: str, rows: int) -> None: ...


def test_rooms_on_board_have_the_same_scripts_for_both_databases() -> None:
    numbers = [
        {room: set(found) for room, found in scripts.RoomScripts(database)._rooms.items()}
        for database in ("sqlite", "postgres")
    ]
    assert numbers[0] == numbers[1]
