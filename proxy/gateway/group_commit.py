"""Writes many records in one commit. Records that arrive during a commit wait for the next; none is dropped."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import StoreUnavailable
from ...store.calls import (
    CALL_END,
    CALL_LARGE_REQUEST,
    CALL_START,
    CALL_SUPERSEDED,
    ROLLOUT_CALL_ENDED,
    TOOL_CALL,
    TOOL_RESULT,
)
from ...store.conversations import CONVERSATION_ORIGIN, CONVERSATION_POINT, CONVERSATION_TIP
from ...store.rollouts import ROLLOUT_SEEN
from ...store.store import Store

log = logging.getLogger(__name__)

Rows = list[dict[str, Any]]
# One of the store's statements, with its parameters.
Statement = tuple[str, dict[str, Any]]
GROUP = 512  # records in one commit, at most

# A call's end comes only after its start was committed, so the statements of a group may be sorted by kind.
# Those of side rooms come last, in the order in which they were put.
_ORDER = {
    statement: place
    for place, statement in enumerate((
        ROLLOUT_SEEN, CALL_START, CALL_LARGE_REQUEST, CALL_SUPERSEDED, CALL_END,
        ROLLOUT_CALL_ENDED, TOOL_CALL, TOOL_RESULT, CONVERSATION_TIP, CONVERSATION_POINT,
        CONVERSATION_ORIGIN,
    ))
}  # fmt: skip


@dataclass(slots=True)
class Entry:
    """A record that waits for its commit. `size` is its approximate number of bytes."""

    statements: Sequence[Statement]
    size: int
    done: asyncio.Future[None]


class GroupCommit:
    """The only writer of a process's records. Use it with `async with`; it ends when nothing waits any more."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[Entry] = deque()
        self._wanted = asyncio.Event()
        self._closing = False
        self._group: Sequence[Entry] = ()  # is being committed
        self._writer: asyncio.Task[None] | None = None
        self._ended: str | None = None  # why nothing is written any more

    async def __aenter__(self) -> GroupCommit:
        self._writer = asyncio.create_task(self._write_groups())
        self._writer.add_done_callback(self._has_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._writer is not None
        self._closing = True
        self._wanted.set()
        await asyncio.wait([self._writer])

    @property
    def depth(self) -> int:
        """Return the number of records that wait for their commit."""
        return len(self._waiting)

    def require(self) -> None:
        """Raise StoreUnavailable if the writer has ended: nothing would be recorded."""
        if self._ended is not None:
            raise StoreUnavailable(self._ended)

    def put(self, statements: Sequence[Statement], size: int) -> asyncio.Future[None]:
        """Return a future that is done when the record is durable, or fails with StoreUnavailable."""
        entry = Entry(statements, size, asyncio.get_running_loop().create_future())
        if self._ended is not None:
            _settle([entry], StoreUnavailable(self._ended))
            return entry.done
        self._waiting.append(entry)
        self._wanted.set()
        return entry.done

    def _has_ended(self, writer: asyncio.Task[None]) -> None:
        """Fail all waiting records if the writer ended by itself, by a bug or because it was cancelled."""
        why = "it was cancelled" if writer.cancelled() else writer.exception()
        if why is None:
            return
        self._ended = f"records are not written any more: {why!s:.200}; start the proxy again"
        log.critical("%s", self._ended, exc_info=None if writer.cancelled() else writer.exception())
        left, self._waiting = [*self._group, *self._waiting], deque()
        _settle(left, StoreUnavailable(self._ended))

    async def _write_groups(self) -> None:
        while self._waiting or not self._closing:
            if not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            await asyncio.sleep(0)  # what else is ready in this turn of the event loop joins the group
            self._group = group = [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP))]
            error = await self._write(group)
            if error is None or isinstance(error, StoreUnavailable):
                _settle(group, error)
                continue
            for one in group:  # one of them cannot be stored at all; the others must not suffer for it
                _settle([one], await self._write([one]))

    async def _write(self, group: Sequence[Entry]) -> Exception | None:
        """Commit the group; return any error, for those who wait."""
        by_statement: dict[str, Rows] = {}
        for entry in group:
            for statement, row in entry.statements:
                by_statement.setdefault(statement, []).append(row)
        runs = sorted(by_statement.items(), key=lambda run: _ORDER.get(run[0], len(_ORDER)))
        size = sum(entry.size for entry in group)
        try:
            try:
                await self._store.database.commit(runs, size)
            except UnicodeEncodeError:
                await self._store.database.commit([(statement, _readable(rows)) for statement, rows in runs], size)
        except Exception as error:
            return error
        return None


def _readable(rows: Rows) -> Rows:
    """The rows with `?` for characters of names and ids that UTF-8 cannot hold; JSON has these escaped."""
    return [
        {name: v.encode(errors="replace").decode() if isinstance(v, str) else v for name, v in row.items()}
        for row in rows
    ]


def _settle(group: Sequence[Entry], error: Exception | None) -> None:
    """Set the futures of a group to the outcome of its commit."""
    if error is not None and not isinstance(error, StoreUnavailable):
        cause, error = error, StoreUnavailable(f"the call could not be recorded: {error!r}")
        error.__cause__ = cause
    for entry in group:
        if not entry.done.done():  # cancelled: the agent left, and nobody waits any more
            entry.done.set_result(None) if error is None else entry.done.set_exception(error)
