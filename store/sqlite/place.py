"""Checks that the open files are still those with the store's names."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import StoreUnavailable

Identity = tuple[int, int, bool]


class Place:
    """The store's file and its write-ahead log. Data in files without a name is gone with the process."""

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, Path(f"{path}-wal")
        self._known = self._now()

    def require(self) -> None:
        """Raise StoreUnavailable if a file was removed, moved or replaced. Call it before a commit is acknowledged."""
        found = self._now()
        if found == self._known:
            return
        if self._known[1] is None and found[0] == self._known[0]:
            self._known = found  # the log came with the first commit
            return
        if found[0] is not None and not found[0][2]:
            raise StoreUnavailable(f"the file {self._path} was emptied: it has 0 bytes. Make it anew from a backup")
        which = self._path if found[0] != self._known[0] else self._log
        raise StoreUnavailable(f"the file {which} was removed or replaced: start the proxy again")

    def _now(self) -> tuple[Identity | None, Identity | None]:
        return _identity(self._path), _identity(self._log, may_be_empty=True)


def _identity(path: Path, *, may_be_empty: bool = False) -> Identity | None:
    """Which file has this name: its device and number, and whether it has content; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, may_be_empty or found.st_size > 0
