"""Does the long work of large requests in a thread, so that the event loop serves others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LARGE = 2**17  # bytes of a request, from which on the way to a thread costs less than the wait of others


async def aside(size: int, work: Callable[[], T]) -> T:
    """Do `work`, which uses nothing that others change; at once for a small request."""
    return work() if size < LARGE else await asyncio.to_thread(work)
