"""What all request bodies together may take."""

from __future__ import annotations

import asyncio

import pytest

from lightning_proxy.proxy.errors import Overloaded
from lightning_proxy.proxy.gateway.asgi import Memory


async def test_those_that_come_later_wait_in_the_order_in_which_they_came() -> None:
    memory, order = Memory(100), list[str]()

    async def borrow(name: str, size: int) -> None:
        lent = await memory.take(size)
        order.append(name)
        memory.give_back(lent)

    first = await memory.take(60)
    waiting = [asyncio.create_task(borrow(name, size)) for name, size in (("large", 90), ("small", 10))]
    await asyncio.sleep(0.01)
    assert order == []
    memory.give_back(first)
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]


async def test_what_is_larger_than_all_there_is_gets_all() -> None:
    memory = Memory(100)
    lent = await memory.take(1000)
    waiting = asyncio.create_task(memory.take(1))
    await asyncio.sleep(0.01)
    assert (lent, waiting.done()) == (100, False)
    memory.give_back(lent)
    assert await waiting == 1


async def test_nothing_is_lost_by_those_who_give_up() -> None:
    memory = Memory(100, wait_s=0.05)
    lent = await memory.take(100)
    with pytest.raises(Overloaded):
        await memory.take(50)
    for cancelled_first in (True, False):
        leaves = asyncio.create_task(memory.take(50))
        await asyncio.sleep(0.01)
        for cancels in (cancelled_first, not cancelled_first):  # its turn comes at the very moment
            leaves.cancel() if cancels else memory.give_back(lent)
        await asyncio.wait([leaves])
        assert leaves.cancelled()
        lent = await memory.take(100)
        assert lent == 100
