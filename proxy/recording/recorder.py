"""Durable records at the speed of one commit for many calls: one writer, group commit.

`start` returns when the record is committed, and only then is the request sent upstream; the answer's last byte waits
for what `end` returns. Where too many records wait, further calls do too: nothing is ever dropped.
"""

from __future__ import annotations

import asyncio
import sqlite3
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..apis.tools import conversation, tool_results
from ..errors import StoreUnavailable
from ..gateway.ports import Statement
from ..json_text import dumps
from ..store.calls import (
    CALL_END,
    CALL_LARGE_REQUEST,
    CALL_START,
    CALL_SUPERSEDED,
    ROLLOUT_CALL_ENDED,
    TOOL_CALL,
    TOOL_RESULT,
    call_end_row,
)
from ..store.conversations import CONVERSATION_ORIGIN, CONVERSATION_POINT, CONVERSATION_TIP
from ..store.delta import common_prefix, shrink_request
from ..store.rollouts import ROLLOUT_SEEN
from ..store.store import Store
from ..types import CallEnd, CallStart

Statements = list[Statement]
Rows = list[dict[str, Any]]
GROUP = 512  # records in one commit, at most
LARGE_REQUEST = 4_000  # characters of a request that is stored apart from its call


@dataclass(slots=True)
class Entry:
    """A record that waits for its commit; `size`: about how many bytes it has."""

    statements: Statements
    size: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class Tail:
    """A recent call of a rollout, kept in memory so that later calls are stored as what they add to it."""

    call_id: str
    request: dict[str, Any]
    row_ids: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class RolloutTails:
    """The recent calls of one rollout, newest last, and about how many bytes they and what they share take."""

    tails: list[Tail] = field(default_factory=list)
    size: int = 0


class Recorder:
    """Turns records into statements and commits them in groups. Run it with `async with`."""

    def __init__(self, store: Store, *, merged: bool, starts: int = 4096, memory: int = 2**27, tails: int = 4) -> None:
        self._store = store
        self._merged = merged
        self._waiting: deque[Entry] = deque()
        self._wanted = asyncio.Event()
        self._starts = asyncio.Semaphore(starts)
        self._closing = False
        self._tails: OrderedDict[str, RolloutTails] = OrderedDict()
        self._memory = memory  # bytes of recent calls to keep
        self._kept = 0
        self._parents: dict[str, Tail | None] = {}
        self._max_tails = tails
        self._writer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Recorder:
        self._writer = asyncio.create_task(self._write_groups())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._writer is not None
        self._closing = True
        self._wanted.set()
        await self._writer

    @property
    def depth(self) -> int:
        """Records that wait for their commit."""
        return len(self._waiting)

    async def start(self, start: CallStart, also: Sequence[Statement] = ()) -> None:
        """Record a call as `incomplete`, and `also` with it; raises StoreUnavailable."""
        rollout_id = start.rollout.rollout_id
        parent = self._longest_parent(rollout_id, start.request)
        stored = _stored_request(start, parent)
        large = len(stored) > LARGE_REQUEST
        row = {
            "rollout_id": rollout_id,
            "task_id": start.rollout.task_id,
            "agent": start.rollout.agent,
            "mode": start.rollout.mode,
            "policy_version": start.policy_version,
            "pin": start.policy_version if start.pins else None,
            "at": start.started_at,
            "call_id": start.call_id,
            "parent_id": parent.call_id if parent else None,
            "endpoint": start.endpoint,
            "upstream": start.upstream,
            "model": start.model,
            "request": "" if large else stored,
            "large_request": stored,
        }
        messages = conversation(start.request)
        known = common_prefix(messages, conversation(parent.request)) if parent else 0
        results = [
            (
                TOOL_RESULT,
                {"rollout_id": rollout_id, "tool_call_id": r.tool_call_id, "is_error": r.is_error}
                | {"result": dumps(r.content)},
            )
            # Of results with the same id, which some agents count anew in every turn, only the newest can be new.
            for r in {r.tool_call_id: r for r in tool_results(messages[known:])}.values()
        ]
        statements: Statements = [(one, row) for one in (ROLLOUT_SEEN, CALL_START)]
        statements += [(CALL_LARGE_REQUEST, row)] if large else []
        statements += [*results, *also]
        running = self._parents.keys()
        if start.is_retry and (earlier := await self._store.calls.superseded(rollout_id, start.request, running)):
            statements.append((CALL_SUPERSEDED, {"call_id": start.call_id, "earlier": earlier.call_id}))
        try:
            async with self._starts:
                await self._put(statements, len(stored))
        except StoreUnavailable as error:
            if parent is None or not isinstance(error.__cause__, sqlite3.IntegrityError):
                raise
            self.forget(rollout_id)  # another process deleted the parent
            await self.start(start, also)
            return
        self._parents[start.call_id] = parent
        self._remember(rollout_id, Tail(start.call_id, _sharing(start.request, parent)), len(stored))

    def end(self, end: CallEnd, also: Sequence[Statement] = ()) -> asyncio.Future[None]:
        """Record how a call ended, and `also` with it.

        The future is done when that is durable, or fails with StoreUnavailable.
        """
        parent = self._parents.pop(end.call_id, None)
        shared = common_prefix(array("i", end.prompt_token_ids), parent.row_ids) if parent else 0
        row = call_end_row(end, shared, self._merged and not end.imported)
        tools = [
            (
                TOOL_CALL,
                {"rollout_id": end.rollout_id, "call_id": end.call_id, "position": position}
                | {"tool_call_id": tool.id, "name": tool.name, "arguments": tool.arguments},
            )
            for position, tool in enumerate(end.tool_calls)
        ]
        size = len(row["response"] or "") + 12 * row["tokens"] + 4 * len(end.prompt_token_ids)
        done = self._put([(CALL_END, row), (ROLLOUT_CALL_ENDED, row), *tools, *also], size)
        done.add_done_callback(lambda committed: self._remember_tokens(end, committed))
        return done

    def forget(self, rollout_id: str) -> None:
        """The rollout was deleted: no later call is stored as what it adds to one of its calls."""
        if (recent := self._tails.pop(rollout_id, None)) is not None:
            self._kept -= recent.size

    def _put(self, statements: Statements, size: int) -> asyncio.Future[None]:
        entry = Entry(statements, size, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._wanted.set()
        return entry.done

    async def _write_groups(self) -> None:
        """Commit what waits, as it comes, until the recorder is closed and nothing waits."""
        while self._waiting or not self._closing:
            if not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP))]
            error = await self._write(group)
            if error is not None and not isinstance(error, StoreUnavailable) and len(group) > 1:
                # One of them cannot be stored at all; the others must not suffer for it.
                for one in group:
                    _settle([one], await self._write([one]))
            else:
                _settle(group, error)

    async def _write(self, group: Sequence[Entry]) -> Exception | None:
        """Commit the group; the error, whatever it is, since those who wait must hear of it."""
        by_statement: dict[str, Rows] = {}
        for entry in group:
            for statement, row in entry.statements:
                by_statement.setdefault(statement, []).append(row)
        runs = sorted(by_statement.items(), key=lambda run: _ORDER[run[0]])
        size = sum(entry.size for entry in group)
        try:
            try:
                await self._store.database.commit(runs, size)
            except UnicodeEncodeError:
                await self._store.database.commit([(statement, _readable(rows)) for statement, rows in runs], size)
        except Exception as error:
            return error
        return None

    def _longest_parent(self, rollout_id: str, request: dict[str, Any]) -> Tail | None:
        messages = conversation(request)
        recent = self._tails.get(rollout_id)
        shared = [(common_prefix(messages, conversation(t.request)), t) for t in recent.tails] if recent else []
        return max(shared, key=lambda pair: pair[0])[1] if shared else None

    def _remember_tokens(self, end: CallEnd, committed: asyncio.Future[None]) -> None:
        recent = self._tails.get(end.rollout_id)
        if recent is None or not end.choices or committed.cancelled() or committed.exception():
            return
        for tail in recent.tails:
            if tail.call_id == end.call_id:
                tail.row_ids = array("i", end.prompt_token_ids + end.choices[0].token_ids)
                self._count(recent, len(tail.row_ids) * tail.row_ids.itemsize)

    def _remember(self, rollout_id: str, tail: Tail, size: int) -> None:
        recent = self._tails.setdefault(rollout_id, RolloutTails())
        self._tails.move_to_end(rollout_id)
        recent.tails.append(tail)
        for forgotten in recent.tails[: -self._max_tails]:
            self._count(recent, -len(forgotten.row_ids) * forgotten.row_ids.itemsize)
        del recent.tails[: -self._max_tails]
        self._count(recent, size)

    def _count(self, recent: RolloutTails, size: int) -> None:
        """Forget the rollouts that were quiet the longest when there is too much to remember."""
        recent.size += size
        self._kept += size
        while self._kept > self._memory and self._tails:
            self._kept -= self._tails.popitem(last=False)[1].size


def _readable(rows: Rows) -> Rows:
    """Of a name or an id that UTF-8 cannot hold, what it can; JSON has such text escaped."""
    return [
        {name: v.encode(errors="replace").decode() if isinstance(v, str) else v for name, v in row.items()}
        for row in rows
    ]


def _settle(group: Sequence[Entry], error: Exception | None) -> None:
    """Tell those who wait how the commit went."""
    if error is not None and not isinstance(error, StoreUnavailable):
        cause, error = error, StoreUnavailable(f"the call could not be recorded: {error!r}")
        error.__cause__ = cause
    for entry in group:
        if not entry.done.done():  # cancelled: the agent left, and nobody waits any more
            entry.done.set_result(None) if error is None else entry.done.set_exception(error)


# A call's end comes only after its start was committed, so the statements of a group may be sorted by kind.
_ORDER = {
    statement: place
    for place, statement in enumerate((
        ROLLOUT_SEEN, CALL_START, CALL_LARGE_REQUEST, CALL_SUPERSEDED, CALL_END,
        ROLLOUT_CALL_ENDED, TOOL_CALL, TOOL_RESULT, CONVERSATION_TIP, CONVERSATION_POINT,
        CONVERSATION_ORIGIN,
    ))
}  # fmt: skip


def _stored_request(start: CallStart, parent: Tail | None) -> str:
    """What `delta.py` makes of the request; one without a parent is stored in the agent's own words."""
    if parent is None and start.request_text is not None:
        return f'{{"new":{start.request_text}}}'
    return dumps(shrink_request(start.request, parent.request if parent else None))


def _sharing(request: dict[str, Any], parent: Tail | None) -> dict[str, Any]:
    """The request with the messages that it repeats taken from its parent: kept in memory once."""
    if parent is None or not (messages := conversation(request)):
        return request
    before = conversation(parent.request)
    known = common_prefix(messages, before)
    return request | {"messages" if "messages" in request else "input": before[:known] + messages[known:]}
