"""The trainer waits for the store or for its end, whichever comes first."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from lightning_proxy.core.errors import NotSaved
from lightning_proxy.store.database import Changes
from lightning_proxy.trainer.waiting import in_thread, pause_until_changed


async def test_a_stop_ends_the_wait_for_changes() -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(pause_until_changed(stop, Changes(), 3600))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(20):
        await waiting


async def test_changes_end_the_wait_before_a_stop() -> None:
    async with asyncio.timeout(20):
        await pause_until_changed(asyncio.Event(), Changes(), 0)


async def test_work_in_a_thread_that_raises_stop_iteration_ends() -> None:
    empty: Iterator[int] = iter(())
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_thread(next, empty)


async def test_work_that_failed_leaves_nothing_behind() -> None:
    held: list[weakref.ref[Any]] = []

    def save() -> None:
        weights = {1, 2, 3}
        held.append(weakref.ref(weights))
        raise NotSaved("the disk is full")

    gc.disable()
    try:
        with suppress(NotSaved):
            await in_thread(save)
        await asyncio.sleep(0)  # the loop still holds what woke this task
        assert held[0]() is None
    finally:
        gc.enable()
