"""A store's file: making its tables, copying it, reading it without writing, and locks between processes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from ...core.errors import LightningError
from ..schema import NUMBERS, missing_parts, parts, require_all

FILES = ("", "-wal", "-shm")  # what SQLite adds to a store's name


def make_private(path: Path) -> None:
    """Create the file, if missing, readable only by its owner. SQLite gives its other files the same permissions."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def copy_store(source: Path, target: Path) -> None:
    """Copy a store as it is at one moment. If it is not in use, no files are left next to it."""
    try:
        with closing(only_read(source)) as connection:
            missing_in(connection, str(source))  # or it is not a store of this schema
            make_private(target)
            connection.execute("VACUUM INTO ?", (str(target),))
    except sqlite3.Error as error:
        raise LightningError(f"the store {source} cannot be copied to {target}: {error}") from None


def back_up(store: Path, target: Path) -> None:
    """Copy a store, which may be in use, to a new file. A failure leaves no partial copy."""
    if target.exists():
        raise LightningError(f"{target} already exists: name a new file")
    if not target.absolute().parent.is_dir():
        raise LightningError(f"there is no directory {target.absolute().parent}")
    with new_store(target) as part:
        copy_store(store, part)


def restore(backup: Path, store: Path) -> None:
    """Make a store from a backup. Raises LightningError if `store` exists or `backup` is not a store of this schema."""
    if any(store.with_name(store.name + suffix).exists() for suffix in FILES):
        raise LightningError(
            f"there is already a store at {store}: move it away, with the files next to it, or set store.url"
        )
    if not backup.is_file() or not is_sqlite(backup):
        raise LightningError(f"there is no backup of a store at {backup}")
    store.parent.mkdir(parents=True, exist_ok=True)
    back_up(backup, store)


@contextmanager
def new_store(target: Path) -> Iterator[Path]:
    """Yield a temporary path to create a store at. The file becomes `target` once the block succeeds."""
    part = target.with_name(f".{target.name}.part")
    _remove(part)
    try:
        yield part
        with closing(sqlite3.connect(part)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with part.open("rb") as file:
            os.fsync(file.fileno())
        _remove(target)
        part.replace(target)
    finally:
        _remove(part)


def _remove(store: Path) -> None:
    for suffix in FILES:
        store.with_name(store.name + suffix).unlink(missing_ok=True)


def connect_to_read(store: Path, wait_s: float) -> sqlite3.Connection:
    """Open a store for reading only, for use in any thread. Raises sqlite3.Error or OtherSchema if that fails."""
    connection = only_read(store, wait_s)
    try:
        require_all(str(store), missing_in(connection, str(store)))
    except BaseException:
        connection.close()
        raise
    connection.row_factory = sqlite3.Row
    return connection


def is_in_use(store: Path) -> bool:
    """Return whether a process has the store open, or was killed before closing it."""
    return any(store.with_name(store.name + suffix).exists() for suffix in FILES[1:])


class IdleFile:
    """A store's file that was not in use when first seen. SQLite reads it as if it never changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._was = self._now()

    def is_written(self) -> bool:
        """Return whether the file, or SQLite's log next to it, has changed since the file was first seen."""
        return self._now() != self._was

    def _now(self) -> tuple[int, ...]:
        log = self.path.with_name(f"{self.path.name}-wal")
        with suppress(OSError):  # removed
            file = self.path.stat()
            return file.st_ino, file.st_size, file.st_mtime_ns, log.stat().st_size if log.exists() else 0
        return ()


def only_read(store: Path, wait_s: float = 5.0) -> sqlite3.Connection:
    """Open the file such that SQLite writes nothing, not even a log next to it."""
    mode = "mode=ro" if is_in_use(store) else "mode=ro&immutable=1"
    return sqlite3.connect(f"file:{quote(str(store))}?{mode}", wait_s, check_same_thread=False, uri=True)


@contextmanager
def lock_file(store: Path, work: str = "keeper") -> Iterator[bool]:
    """Yield whether this process got the lock for this work. It is released when the block or the process ends."""
    with Path(f"{store}-{work}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def missing_in(connection: sqlite3.Connection, where: str) -> list[str]:
    """Return which `parts` have no tables in the file yet. Raises OtherSchema as `missing_parts` does."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return missing_parts(where, tables, dict(connection.execute(NUMBERS)) if "schema_numbers" in tables else {})


def make_tables(connection: sqlite3.Connection, where: str) -> None:
    """Make the missing tables in one transaction, because several processes may start at once."""
    if not missing_in(connection, where):
        return
    connection.execute("BEGIN IMMEDIATE")
    statement = ""
    for line in "".join(parts("sqlite")[name][1] for name in missing_in(connection, where)).splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):  # `executescript` would commit the transaction around them
            connection.execute(statement)
            statement = ""
    connection.execute("COMMIT")
