"""Does the long work of large requests in a thread, so that all others get their turns meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LARGE = 2**17  # bytes of a request, from which on the way to a thread costs less than the wait of others


async def aside(size: int, work: Callable[[], T]) -> T:
    """Do `work`, which holds on to nothing that others change; at once for a request of few bytes."""
    return work() if size < LARGE else await asyncio.to_thread(work)
