"""The schema in SQLite: numbered scripts in `store/migrations/`, each run once on every store, then those of rooms."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from ..scripts import HOUSE, MAKE_ROOMS, ROOM_SEEN, ROOMS_SEEN, RoomScripts, Scripts, scripts_in

# `user_version` of a store is this and the number of its last script. Development versions before 0.1.0 counted from 0.
FIRST = 100


def require_ours(connection: sqlite3.Connection) -> None:
    """Raise NotSupportedError for a release that this one cannot read, DatabaseError for what is no store of ours."""
    # In this order: another process that makes the store commits its tables and its version at once.
    has_tables = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
    version = _version(connection)
    if version > FIRST + max(_scripts()) or RoomScripts("sqlite").is_newer(_rooms_seen(connection)):
        raise sqlite3.NotSupportedError("a newer lightning-proxy has worked on it; update this one, or set store.url")
    if 0 < version <= FIRST:
        raise sqlite3.NotSupportedError(
            "a lightning-proxy before 0.1.0 made it, which this one cannot read; "
            "set store.url to a new file, or export the old one with the release that made it"
        )
    if version == 0 and has_tables:
        raise sqlite3.DatabaseError("it belongs to another program; set store.url to a new file")


def require_up_to_date(connection: sqlite3.Connection) -> None:
    """Raise NotSupportedError for a store that is empty, or has to be migrated first."""
    if _version(connection) == 0:
        raise sqlite3.NotSupportedError("it is empty; `lightning-proxy serve` makes a store in it")
    if _version(connection) < FIRST + max(_scripts()) or RoomScripts("sqlite").unseen(_rooms_seen(connection)):
        raise sqlite3.NotSupportedError(
            "an earlier lightning-proxy worked on it last; `lightning-proxy serve` brings it up to date"
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Run the scripts that this store has not seen, in one transaction: several processes may start at once."""
    scripts, rooms = _scripts(), RoomScripts("sqlite")
    if _version(connection) == FIRST + max(scripts) and not rooms.unseen(_rooms_seen(connection)):
        return
    connection.execute("BEGIN IMMEDIATE")
    version = _version(connection)
    for number, script in sorted(scripts.items()):
        if FIRST + number > version:
            _run(connection, script)
            connection.execute(f"PRAGMA user_version = {FIRST + number}")
    for room, number, script in rooms.unseen(_rooms_seen(connection)):
        _run(connection, script)
        connection.execute(MAKE_ROOMS)
        connection.execute(ROOM_SEEN, {"room": room, "number": number})
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _rooms_seen(connection: sqlite3.Connection) -> dict[str, int]:
    """By room: its last script that this store has seen."""
    has_any = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'room_migrations'").fetchone() is not None
    return dict(connection.execute(ROOMS_SEEN)) if has_any else {}


def _scripts() -> Scripts:
    return scripts_in(HOUSE / "store" / "migrations")


def _run(connection: sqlite3.Connection, script: str) -> None:
    for statement in _statements(script):
        connection.execute(statement)


def _statements(script: str) -> Iterator[str]:
    """Split an SQL script; `executescript` would commit the transaction around it."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
