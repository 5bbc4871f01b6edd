"""Checks whether a trainer runs, and what is missing for its next step. It only looks at the store's files."""

from __future__ import annotations

import fcntl
from collections.abc import AsyncIterator
from pathlib import Path

from ...proxy.config.root import Config
from ...proxy.config.server import StoreConfig
from ...proxy.config.trainer import TrainerConfig
from ...proxy.errors import StoreUnavailable
from ...proxy.groups import Group, Grouping
from ...proxy.store.opening import opened
from ...proxy.store.store import Store
from .checks import Check, failed, ok, warning


async def check_training(config: Config) -> AsyncIterator[Check]:
    """Yield checks of the trainer and of its next step."""
    if not config.store.may_be_there:
        return
    try:
        async with opened(config.store) as database:
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


def full_groups(groups: list[Group]) -> int:
    """Count the groups that a step can take, all siblings of which have ended."""
    return sum(group.group_id is None and group.complete for group in groups)


def what_is_missing(groups: list[Group], trainer: TrainerConfig) -> str:
    """Return how many groups are full, and how many a step still needs, as text."""
    wanted, full = trainer.tasks_per_step, full_groups(groups)
    begun = [group for group in groups if group.group_id is None and not group.complete]
    line = f"{full} of the {wanted} groups that it takes are full (of {trainer.group_size} ended rollouts)"
    if full >= wanted:
        return f"{line}: it can be made"
    if not begun:
        return f"{line}; no other group has begun"
    lacking = sum(len(group.awaited) or trainer.group_size - group.ended for group in begun)
    short = f"{lacking} rollout{'s' * (lacking != 1)} short"
    return f"{line}; {len(begun)} more {'has' if len(begun) == 1 else 'have'} begun, {short}"
