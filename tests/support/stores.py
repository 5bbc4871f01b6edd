"""Where a test's store is: a file, or with `--store postgres` a database of a server that many tests share."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_proxy.store.database import Database, Transaction, Work

from .postgres import Server

server: Server | None = None
_made: dict[Path, str] = {}


def store_url(directory: Path) -> str:
    """Return the address of the store that belongs to a directory."""
    if server is None:
        return f"sqlite:///{directory}/store.db"
    return _made.get(directory) or _made.setdefault(directory, server.new_database())


class _UndoneError(Exception):
    """Undoes a transaction."""


def do_again(database: Database) -> None:
    """Have every transaction undone when it is almost done, and done again, as where another got in its way."""
    write = database.write

    async def twice(work: Work[Any], size: int = 0) -> Any:
        async def undone(db: Transaction) -> None:
            await work(db)
            raise _UndoneError

        with suppress(_UndoneError):
            await write(undone, size)
        return await write(work, size)

    database.write = twice  # type: ignore[method-assign]
