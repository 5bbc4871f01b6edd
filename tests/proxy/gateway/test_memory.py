"""What all bodies and answers together may take."""

from __future__ import annotations

import asyncio

import pytest

from lightning_proxy.core.errors import Overloaded
from lightning_proxy.proxy.gateway.asgi import Memory


async def test_those_that_come_later_wait_in_the_order_in_which_they_came() -> None:
    memory, order = Memory(100, 100), list[str]()

    async def borrow(name: str, size: int) -> None:
        with memory.loan(name) as loan:
            await loan.grow(size)
            order.append(name)

    with memory.loan("first") as first:
        await first.grow(60)
        waiting = [asyncio.create_task(borrow(name, size)) for name, size in (("large", 90), ("small", 10))]
        await asyncio.sleep(0.01)
        assert order == []
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]


async def test_a_key_that_has_its_share_waits_and_no_other_waits_for_it() -> None:
    memory = Memory(100, 25)
    with memory.loan("one") as one, memory.loan("one") as more, memory.loan("other") as other:
        await one.grow(1000)  # larger than its share: it gets all of that
        waiting = asyncio.create_task(more.grow(1))
        await asyncio.sleep(0.01)
        await other.grow(25)
        assert (one.size, waiting.done()) == (25, False)
        one.shrink(5)
        await waiting


async def test_nothing_is_lent_to_a_key_whose_answers_are_not_read() -> None:
    memory = Memory(100, 25)
    with memory.loan("one") as one:
        one.not_taken(30)
    with pytest.raises(Overloaded):
        memory.loan("one")
    memory.loan("other")
    one.not_taken(0)
    with memory.loan("one") as again:
        await again.grow(25)


async def test_nothing_is_lost_by_those_who_give_up() -> None:
    memory = Memory(100, 100, wait_s=0.05)
    with memory.loan("all") as lent, memory.loan("late") as late:
        await lent.grow(100)
        with pytest.raises(Overloaded):
            await late.grow(50)
    for cancelled_first in (True, False):
        with memory.loan("all") as lent, memory.loan("leaves") as leaves:
            await lent.grow(100)
            leaving = asyncio.create_task(leaves.grow(50))
            await asyncio.sleep(0.01)
            for cancels in (cancelled_first, not cancelled_first):  # its turn comes at the very moment
                leaving.cancel() if cancels else lent.shrink()
            await asyncio.wait([leaving])
            assert leaving.cancelled() and leaves.size == 0
