"""Bounds what all request bodies that are being read may take together. Those that come later wait their turn."""

from __future__ import annotations

import asyncio
from collections import deque

from ..errors import Overloaded

WAIT_S = 5.0


class Memory:
    """So many bytes to lend, in the order in which they are asked for: a large body is not overtaken for ever."""

    def __init__(self, size: int, wait_s: float | None = None) -> None:
        self._size = size
        self._free = size
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> int:
        """Lend `size` bytes, or all there are, and return how many. Raise Overloaded after a wait."""
        size = min(size, self._size)
        if size <= self._free and not self._queue:
            self._free -= size
            return size
        turn = (size, asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn[1]
        except BaseException as error:
            self._leave(turn)
            if isinstance(error, TimeoutError):
                raise Overloaded("too many large requests at once; try again in a moment") from None
            raise
        return size

    def give_back(self, size: int) -> None:
        self._free += size
        while self._queue and self._queue[0][0] <= self._free:
            asked, turn = self._queue.popleft()
            if not turn.done():  # it is, if who waits was cancelled just now
                self._free -= asked
                turn.set_result(None)

    def _leave(self, turn: tuple[int, asyncio.Future[None]]) -> None:
        """Give up a turn: one that has come just now gives its bytes back."""
        size, come = turn
        has_come = come.done() and not come.cancelled()
        if turn in self._queue:
            self._queue.remove(turn)
        self.give_back(size if has_come else 0)
