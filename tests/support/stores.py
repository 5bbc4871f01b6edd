"""Where a test's store is: a file, or with `--store postgres` a database of a server that many tests share."""

from __future__ import annotations

from pathlib import Path

from .postgres import Server

server: Server | None = None
_made: dict[Path, str] = {}


def store_url(directory: Path) -> str:
    """Return the address of the store that belongs to a directory."""
    if server is None:
        return f"sqlite:///{directory}/store.db"
    return _made.get(directory) or _made.setdefault(directory, server.new_database())
