"""Checks whether a trainer runs, and what is missing for its next step. It only looks at the store's files."""

from __future__ import annotations

import fcntl
from collections.abc import AsyncIterator
from pathlib import Path

from ...core.config.root import Config
from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ...core.groups import Grouping
from ...store.opening import opened
from ...store.store import Store
from ...trainer.collect.groups import full_groups, what_is_missing
from .checks import Check, failed, ok, warning


async def check_training(config: Config) -> AsyncIterator[Check]:
    """Yield checks of the trainer and of its next step."""
    if not config.store.may_be_there:
        return
    try:
        async with opened(config.store, to_write=False) as database:
            groups = await Store(database).waiting.groups(grouping=Grouping.of(config.trainer))
    except StoreUnavailable as error:
        yield failed("next step", error.message, "see the store's check above")
        return
    enough = full_groups(groups) >= config.trainer.tasks_per_step
    if trainer_runs(config.store):
        yield ok("trainer", "one runs on this store")
    elif enough:
        yield warning("trainer", "none runs, and a step could be made", "start it with `lightning-proxy train`")
    else:
        yield ok("trainer", "none runs on this machine; `lightning-proxy train` starts one")
    yield ok("next step", what_is_missing(groups, config.trainer))


def trainer_runs(store: StoreConfig) -> bool:
    """Return whether a trainer on this machine holds the lock of the store's file."""
    if store.is_postgres:
        return False
    path = store.path.expanduser().resolve()
    try:
        with Path(f"{path}-trainer").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there was never one
        return False
    return False
