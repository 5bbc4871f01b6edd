"""The tables of a store, in the order in which they can be filled: what a row refers to comes before it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

Record = tuple[Any, ...]

# By table: the columns that order its rows, each row at another place. `rowid` is moved, too: it is the order of calls.
ORDERS = {
    "policy_versions": "version",
    "policy_log": "n",
    "promotions": "n",
    "publishing": "n",
    "probes": "version",
    "steps": "step",
    "prompts": "name",
    "prompt_versions": "rowid",
    "prompt_log": "n",
    "prompt_tests": "n",
    "prompt_waiting": "name",
    "reward_function": "function",
    "returns": "n",
    "rollouts": "n",
    "rollout_counts": "mode status",
    "rollout_models": "rollout_id",
    "promotion_rollouts": "rollout_id",
    "rollout_prompts": "rollout_id name",
    "prompt_test_rollouts": "n",
    "awaiting_rewards": "n",
    "keys": "key_id",
    "rollout_keys": "key_hash",
    "calls": "rowid",
    "large_requests": "call_id",
    "call_prompts": "call_id name",
    "call_credit": "n seq",
    "tool_calls": "call_id position",
    "rollout_agents": "agent n",
    "rewards": "reward_id",
    "events": "event_id",
    "idempotency": "key",
    "conversation_points": "digest",
    "conversation_tips": "digest at call_id",
    "feed": "n",
}
_OWN = ("room_migrations", "sqlite_sequence")  # of each store
BATCH = 200  # rows; those of `calls` may be large


@dataclass(frozen=True)
class Table:
    """A table. `columns`: in the order of a record; `order`: those that order its rows; `texts`: the texts of those."""

    name: str
    columns: tuple[str, ...]
    order: tuple[str, ...]
    texts: frozenset[str]


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
    """Return the tables by the schema of an SQLite store: the numbered ones, and those of rooms by their keys."""
    names = [name for (name,) in schema.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")]
    of_rooms = [name for name in names if name not in ORDERS and name not in _OWN]
    orders = {name: tuple(order.split()) for name, order in ORDERS.items()}
    orders |= {name: _key(schema, name) for name in of_rooms}
    return [_table(schema, name, order) for name, order in orders.items()]


def _key(schema: sqlite3.Connection, name: str) -> tuple[str, ...]:
    key = sorted((row[5], row[1]) for row in schema.execute(f"PRAGMA table_info({name})") if row[5])
    return tuple(column for _, column in key)


def _table(schema: sqlite3.Connection, name: str, order: tuple[str, ...]) -> Table:
    kinds = {row[1]: row[2] for row in schema.execute(f"PRAGMA table_info({name})")}
    columns = (*(["rowid"] if "rowid" in order else []), *kinds)
    return Table(name, columns, order, frozenset(column for column in order if kinds.get(column) == "TEXT"))


def quoted(columns: tuple[str, ...]) -> str:
    return ", ".join("rowid" if column == "rowid" else f'"{column}"' for column in columns)
