"""Waits for missing resources (the store, space on the disk, vLLM, a teacher), and for work in tasks and threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from ..core.errors import LightningError

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

RETRY_S = 2.0


class Stopped(Exception):
    """The trainer was asked to stop while it waited."""


class GuideError(LightningError):
    """A guide, such as a teacher, cannot be reached, or refuses a request. The step is tried again."""


async def pause(stop: asyncio.Event, seconds: float | None = None) -> None:
    """Wait for `seconds` (by default RETRY_S), or until `stop` is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), RETRY_S if seconds is None else seconds)


async def before_retry(stop: asyncio.Event) -> None:
    """Wait before the next try. Raises Stopped if `stop` is set by then."""
    await pause(stop)
    if stop.is_set():
        raise Stopped


async def until_done(
    what: str, work: Callable[[], Awaitable[T]], errors: tuple[type[LightningError], ...], stop: asyncio.Event
) -> T:
    """Do the work, and repeat it after any of these errors. Raises Stopped if `stop` is set before the next try."""
    while True:
        try:
            return await work()
        except errors as error:
            log.error("%s: %s", what, error)
        await before_retry(stop)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run several tasks at once; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do `work` in a thread and return its result. If this is cancelled, it still waits until the work has ended."""

    def guarded() -> T:
        try:
            return work(*args, **kwargs)
        except StopIteration as error:  # no future can hold it, so awaiting it would never end
            raise RuntimeError(f"{work!r} raised StopIteration") from error

    doing = asyncio.create_task(asyncio.to_thread(guarded))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.gather(doing, return_exceptions=True)
        raise
    finally:
        del doing  # it holds the work's error, which holds this frame and the weights that the work held
