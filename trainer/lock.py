"""Locks the store and the directory of policies: only one trainer may use them at a time."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..core.config.root import Config
from ..core.errors import ConfigError, StoreUnavailable
from ..store.database import Database
from .waiting import pause

log = logging.getLogger(__name__)

RELEASED_S = 3.0


@contextmanager
def only_trainer(directory: Path, store: Path | None) -> Iterator[None]:
    """Lock the directory, and the store if it is a file. Two trainers would overwrite checkpoints and share rollouts.

    The locks are released when the block or the process ends. Raises ConfigError if another trainer holds one.
    """
    locks = {directory: directory / "trainer.lock"}
    if store is not None:
        store = store.expanduser().resolve()
        locks[store] = Path(f"{store}-trainer")
    with ExitStack() as stack:
        for held, lock in locks.items():
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another trainer is using {held}; stop it first") from None
        yield


async def require_free(config: Config, database: Database) -> None:
    """Raise ConfigError if another trainer, on any machine, is using a store that is not a file.

    Waits for up to RELEASED_S, as the server may need a moment to release the lock of a killed trainer.
    """
    until = time.monotonic() + RELEASED_S
    while True:
        async with database.lock("trainer") as ours:
            if ours:
                return
        if time.monotonic() >= until:
            raise ConfigError(f"another trainer is using {config.store.where}; stop it first")
        await asyncio.sleep(RELEASED_S / 10)


async def while_alone(
    config: Config, database: Database, stop: asyncio.Event, work: Callable[[], Awaitable[None]]
) -> None:
    """Do `work` while holding the store's lock. If the lock is lost, wait for it and do `work` again."""
    held = False
    while not stop.is_set():
        try:
            async with database.lock("trainer") as ours:
                if ours:
                    held = True
                    await work()
                    return
            if not held:
                await require_free(config, database)
        except StoreUnavailable as error:
            if not held:
                raise
            log.error("the trainer waits: %s", error)
        await pause(stop)
