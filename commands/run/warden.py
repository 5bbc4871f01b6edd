"""Lets a process of its own (group_guard.py) end the programs that run if this one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

GUARD = Path(__file__).with_name("group_guard.py")


class Warden:
    """Starts the process with the first program, and ends it with the last."""

    def __init__(self) -> None:
        self._starting, self._programs = asyncio.Lock(), 0
        self._child: asyncio.subprocess.Process | None = None

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[Callable[[str], None]]:
        """Yield a function that takes `+PID` and `-PID`."""
        async with self._starting:
            if self._child is None:
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", "-S", str(GUARD), stdin=asyncio.subprocess.PIPE, start_new_session=True
                )
            self._programs += 1
        child = self._child
        assert child.stdin is not None
        try:
            yield lambda line: child.stdin.write(f"{line}\n".encode())  # type: ignore[union-attr]
        finally:
            self._programs -= 1
            if self._programs == 0:
                self._child = None
                child.stdin.close()
                await child.wait()
