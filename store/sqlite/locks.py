"""Locks on a store's file that let one of several processes do a job."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def keeping(store: Path, work: str = "keeper") -> Iterator[bool]:
    """Yield whether no other process does this work on the store. If so, none will until the block or this one ends."""
    with Path(f"{store}-{work}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
