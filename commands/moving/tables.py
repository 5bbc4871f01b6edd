"""The tables of a store, in the order in which they can be filled: that of the schema."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

Record = tuple[Any, ...]

BATCH = 200  # rows; those of `calls` may be large


@dataclass(frozen=True)
class Table:
    """A table. `columns`: in the order of a record; `key`: those that order its rows, each row at another place."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]


class Source(Protocol):
    """A store that is read as it was at one moment. Its records are as SQLite keeps them."""

    async def count(self, table: Table) -> int: ...

    def read(self, table: Table) -> AsyncIterator[Record]: ...

    def require_unchanged(self) -> None:
        """Raise LightningError if what was read may not be of one moment."""


class NewStore(Source, Protocol):
    """A new store, which is there only when the block that makes it ends without an error."""

    async def fill(self, table: Table, records: AsyncIterable[Record]) -> None: ...

    def kept(self, record: Record) -> Record:
        """Return the record as this store keeps it."""
        ...

    async def finish(self) -> None:
        """Make it as a store is in use, once all tables are filled."""


def read_tables(schema: sqlite3.Connection) -> list[Table]:
    """Return the tables of an SQLite store, but for `schema_numbers`, which each store has for itself."""
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'schema_numbers' ORDER BY rowid"
    return [_table(schema, name) for (name,) in schema.execute(names)]


def _table(schema: sqlite3.Connection, name: str) -> Table:
    columns = [(row[1], row[5]) for row in schema.execute(f"PRAGMA table_info({name})")]  # name, and place in the key
    key = sorted((place, column) for column, place in columns if place)
    return Table(name, tuple(column for column, _ in columns), tuple(column for _, column in key))


def quoted(columns: tuple[str, ...]) -> str:
    return ", ".join(f'"{column}"' for column in columns)
