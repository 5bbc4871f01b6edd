"""A burst of large requests leaves memory that glibc keeps for later: given back to the system when it is much."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

EVERY_S = 10.0
MUCH = 128 * 2**20  # bytes more than were left the last time

STATM = Path("/proc/self/statm")  # in pages: size, resident, …


async def watch(every_s: float = EVERY_S) -> None:
    """Look at the process's memory now and then; returns at once where there is no glibc. Runs until cancelled."""
    trim = _malloc_trim()
    if trim is None:
        return
    left = resident_bytes()
    while True:
        await asyncio.sleep(every_s)
        if resident_bytes() > left + MUCH:
            await asyncio.to_thread(trim, 0)
            left = resident_bytes()


def resident_bytes() -> int:
    """The memory that this process has (Linux)."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim if STATM.exists() else None
