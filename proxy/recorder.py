"""Durable records at the speed of one commit for many calls: a bounded queue, one writer, group commit.

`start` and `end` return when the record is committed; the answer's last byte waits for that.
When the queue is full, callers wait: nothing is ever dropped.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_proxy.proxy import sql
from lightning_proxy.proxy.delta import common_prefix, shrink_request
from lightning_proxy.proxy.errors import StoreUnavailable
from lightning_proxy.proxy.json_text import dumps
from lightning_proxy.proxy.rows import call_end_row
from lightning_proxy.proxy.store import Store
from lightning_proxy.proxy.tools import conversation, tool_results
from lightning_proxy.proxy.types import CallEnd, CallStart

Statements = list[tuple[str, dict[str, Any]]]
Entry = tuple[Statements, asyncio.Future[None]]
GROUP = 512  # records in one commit, at most


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

    def __init__(self, store: Store, *, merged: bool, queue: int = 4096, memory: int = 2**27, tails: int = 4) -> None:
        self._store = store
        self._merged = merged
        self._queue: asyncio.Queue[Entry] = asyncio.Queue(queue)
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
        await self._queue.join()
        assert self._writer is not None
        self._writer.cancel()

    @property
    def depth(self) -> int:
        """Records that wait for their commit."""
        return self._queue.qsize()

    async def start(self, start: CallStart) -> None:
        """Record a call as `incomplete`; raises StoreUnavailable."""
        rollout_id = start.rollout.rollout_id
        parent = self._longest_parent(rollout_id, start.request)
        stored = dumps(shrink_request(start.request, parent.request if parent else None))
        row = {
            "rollout_id": rollout_id,
            "task_id": start.rollout.task_id,
            "agent": start.rollout.agent,
            "mode": start.rollout.mode,
            "policy_version": start.policy_version,
            "at": start.started_at,
            "call_id": start.call_id,
            "parent_id": parent.call_id if parent else None,
            "endpoint": start.endpoint,
            "model": start.model,
            "request": stored,
        }
        messages = conversation(start.request)
        known = common_prefix(messages, conversation(parent.request)) if parent else 0
        results = [
            (
                sql.TOOL_RESULT,
                {"rollout_id": rollout_id, "tool_call_id": r.tool_call_id, "is_error": r.is_error}
                | {"result": dumps(r.content)},
            )
            # Of results with the same id, which some agents count anew in every turn, only the newest can be new.
            for r in {r.tool_call_id: r for r in tool_results(messages[known:])}.values()
        ]
        running = self._parents.keys()
        earlier = await self._store.superseded(rollout_id, start.request, running) if start.is_retry else None
        superseded = [(sql.CALL_SUPERSEDED, {"call_id": start.call_id, "earlier": earlier.call_id})] if earlier else []
        await self._commit([(sql.ROLLOUT_SEEN, row), (sql.CALL_START, row), *superseded, *results])
        self._parents[start.call_id] = parent
        self._remember(rollout_id, Tail(start.call_id, _sharing(start.request, parent)), len(stored))

    async def end(self, end: CallEnd) -> None:
        """Record how a call ended; raises StoreUnavailable."""
        parent = self._parents.pop(end.call_id, None)
        shared = common_prefix(array("i", end.prompt_token_ids), parent.row_ids) if parent else 0
        row = call_end_row(end, shared, self._merged)
        tools = [
            (
                sql.TOOL_CALL,
                {"rollout_id": end.rollout_id, "call_id": end.call_id, "position": position}
                | {"tool_call_id": tool.id, "name": tool.name, "arguments": tool.arguments},
            )
            for position, tool in enumerate(end.tool_calls)
        ]
        await self._commit([(sql.CALL_END, row), (sql.ROLLOUT_CALL_ENDED, row), *tools])
        recent = self._tails.get(end.rollout_id, RolloutTails())
        for tail in recent.tails:
            if tail.call_id == end.call_id and end.choices:
                tail.row_ids = array("i", end.prompt_token_ids + end.choices[0].token_ids)
                self._count(recent, len(tail.row_ids) * tail.row_ids.itemsize)

    def forget(self, rollout_id: str) -> None:
        """The rollout was deleted: no later call is stored as what it adds to one of its calls."""
        if (recent := self._tails.pop(rollout_id, None)) is not None:
            self._kept -= recent.size

    async def _commit(self, statements: Statements) -> None:
        done = asyncio.get_running_loop().create_future()
        await self._queue.put((statements, done))
        await asyncio.shield(done)

    async def _write_groups(self) -> None:
        while True:
            group = [await self._queue.get()]
            while not self._queue.empty() and len(group) < GROUP:
                group.append(self._queue.get_nowait())
            error = await self._write(group)
            if error is not None and not isinstance(error, StoreUnavailable) and len(group) > 1:
                # One of them cannot be stored at all; the others must not suffer for it.
                for one in group:
                    _settle([one], await self._write([one]))
            else:
                _settle(group, error)
            for _ in group:
                self._queue.task_done()

    async def _write(self, group: Sequence[Entry]) -> Exception | None:
        """Commit the group; the error, whatever it is, since those who wait must hear of it."""
        try:
            await self._store.write(_in_groups([statement for statements, _ in group for statement in statements]))
        except Exception as error:
            return error
        return None

    def _longest_parent(self, rollout_id: str, request: dict[str, Any]) -> Tail | None:
        messages = conversation(request)
        recent = self._tails.get(rollout_id)
        shared = [(common_prefix(messages, conversation(t.request)), t) for t in recent.tails] if recent else []
        return max(shared, key=lambda pair: pair[0])[1] if shared else None

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


def _settle(group: Sequence[Entry], error: Exception | None) -> None:
    """Tell those who wait how the commit went."""
    if error is not None and not isinstance(error, StoreUnavailable):
        error = StoreUnavailable(f"the call could not be recorded: {error!r}")
    for _, done in group:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)


# A call's end comes only after its start was committed, so the statements of a group may be sorted by kind.
_ORDER = [
    sql.ROLLOUT_SEEN, sql.CALL_START, sql.CALL_SUPERSEDED, sql.CALL_END, sql.ROLLOUT_CALL_ENDED, sql.TOOL_CALL,
    sql.TOOL_RESULT,
]  # fmt: skip


def _in_groups(statements: Statements) -> Statements:
    return sorted(statements, key=lambda statement: _ORDER.index(statement[0]))


def _sharing(request: dict[str, Any], parent: Tail | None) -> dict[str, Any]:
    """The request with the messages that it repeats taken from its parent: kept in memory once."""
    if parent is None or not (messages := conversation(request)):
        return request
    before = conversation(parent.request)
    known = common_prefix(messages, before)
    return request | {"messages" if "messages" in request else "input": before[:known] + messages[known:]}
