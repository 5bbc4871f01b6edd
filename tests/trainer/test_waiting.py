"""Work that the trainer does in threads."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from lightning_proxy.core.errors import NotSaved
from lightning_proxy.trainer.waiting import in_thread


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
