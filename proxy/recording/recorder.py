"""Records calls: their start before they are sent upstream, their end before the answer's last byte.

`start` returns when the record is committed; what `end` returns is done when that is. Where too many records wait,
further calls do too.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..apis.marks import is_unique
from ..apis.tools import conversation
from ..aside import aside
from ..errors import StoreUnavailable
from ..json_text import dumps, encode
from ..store.calls import (
    CALL_END,
    CALL_LARGE_REQUEST,
    CALL_START,
    CALL_SUPERSEDED,
    ROLLOUT_CALL_ENDED,
    call_end_row,
)
from ..store.database import Refused
from ..store.requests.delta import common_prefix, shrink_request
from ..store.requests.parents import Parent
from ..store.resources.tool_calls import TOOL_CALL, TOOL_RESULT
from ..store.rollouts import ROLLOUT_SEEN
from ..store.store import Store
from ..types import CallEnd, CallStart, ModelCall
from .group_commit import GroupCommit, Statement
from .places import has_results, results, spots, told
from .recent import RecentCall, RecentCalls, parent_of, sharing
from .redact import Redactor

LARGE_REQUEST = 4_000  # bytes of a request that is stored apart from its call
# How much an id tells of whose call it is, beside the signs of TOOL_RESULT; what is needed where the call is resent.
UNIQUE, COUNTED, FITS = 8, 3, 5


class Recorder:
    """Redacts the records of calls, turns them into statements, and commits them. Run it with `async with`.

    What is redacted is so before anything is compared or stored: an earlier call is found again by what is kept of it.
    `on_redacted` hears of every call that cannot be trained on because of it.
    """

    def __init__(
        self,
        store: Store,
        *,
        merged: bool | Callable[[], bool],
        redactor: Redactor | None = None,
        on_redacted: Callable[[], None] = lambda: None,
        starts: int = 4096,
        memory: int = 2**27,
        recent: int = 4,
    ) -> None:
        self._store = store
        self._merged = merged if callable(merged) else lambda: merged
        self._redactor = redactor or None
        self._on_redacted = on_redacted
        self._writer = GroupCommit(store)
        self._starts = asyncio.Semaphore(starts)
        self._recent = RecentCalls(memory, recent)
        self._begun: dict[str, tuple[RecentCall, RecentCall | None]] = {}  # the calls under way, and their parents
        self._shown: set[str] = set()  # the calls under way whose redacted part the model was shown

    async def __aenter__(self) -> Recorder:
        await self._writer.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._writer.__aexit__()

    @property
    def depth(self) -> int:
        """Return the number of records that wait for their commit."""
        return self._writer.depth

    def require(self) -> None:
        """Raise StoreUnavailable if records are not written any more."""
        self._writer.require()

    async def start(self, start: CallStart, also: Sequence[Statement] = ()) -> None:
        """Record a call as `incomplete`, together with `also`. Raise StoreUnavailable."""
        size = len(start.request_text or b"")
        if self._redactor is None:
            await self._start(start, also, size)
            return
        start, shown = await aside(size, partial(self._redactor.start, start))
        if shown:
            self._shown.add(start.call_id)
        try:
            await self._start(start, also, size)
        except Exception:  # then there is no end; after a cancellation there is one
            self._shown.discard(start.call_id)
            raise

    def resume(self, start: CallStart) -> None:
        """Continue a call whose start is recorded already, perhaps by another process, so that its end can follow."""
        if self._redactor is not None:
            start, shown = self._redactor.start(start)
            if shown:
                self._shown.add(start.call_id)
        self._begun[start.call_id] = RecentCall(start.call_id, start.request), None

    def end(self, end: CallEnd, also: Sequence[Statement] = ()) -> asyncio.Future[None]:
        """Record the outcome of a call, together with `also`.

        The future is done when that is durable, or fails with StoreUnavailable.
        """
        was_trainable = end.trainable
        if self._redactor is not None:
            end = self._redactor.end(end, shown=end.call_id in self._shown)
            self._shown.discard(end.call_id)
        call, parent = self._begun.pop(end.call_id, (None, None))
        shared = common_prefix(array("i", end.prompt_token_ids), parent.row_ids) if parent else 0
        row = call_end_row(end, shared, self._merged() and not end.imported)
        tools = _tool_calls(end, call)
        size = len(row["response"] or "") + 12 * row["tokens"] + 4 * len(end.prompt_token_ids)
        done = self._writer.put([(CALL_END, row), (ROLLOUT_CALL_ENDED, row), *tools, *also], size)
        done.add_done_callback(lambda committed: self._ended(end, was_trainable, committed))
        return done

    def forget(self, rollout_id: str) -> None:
        """Drop a deleted rollout from memory, so that no later call is stored as a difference from its calls."""
        self._recent.forget(rollout_id)

    async def _start(self, start: CallStart, also: Sequence[Statement], size: int) -> None:
        rollout_id = start.rollout.rollout_id
        recent = self._recent.of(rollout_id)
        made = await aside(size, partial(_made, start, recent))
        parent, statements = made.parent, [*made.statements, *also]
        if start.is_retry and (earlier := await self._repeated(start, recent)):
            statements.append((CALL_SUPERSEDED, {"call_id": start.call_id, "earlier": earlier.call_id}))
        try:
            async with self._starts:
                await self._writer.put(statements, made.size)
        except StoreUnavailable as error:
            if parent is None or not isinstance(error.__cause__, Refused):
                raise
            self.forget(rollout_id)  # another process deleted the parent
            await self._start(start, also, size)
            return
        self._begun[start.call_id] = made.call, parent
        self._recent.add(rollout_id, made.call, made.size)

    async def _repeated(self, start: CallStart, recent: Iterable[RecentCall]) -> ModelCall | None:
        known = {call.call_id: Parent(call.request, call.row_ids.tobytes()) for call in recent}
        running = self._begun.keys()
        return await self._store.calls.superseded(start.rollout.rollout_id, start.request, known, running)

    def _ended(self, end: CallEnd, was_trainable: bool, committed: asyncio.Future[None]) -> None:
        if committed.cancelled() or committed.exception():
            return
        self._recent.add_tokens(end)
        if was_trainable and not end.trainable:
            self._on_redacted()


class _Made(NamedTuple):
    """What is made of a call's start: its statements, of `size` bytes, and what is remembered of it and its parent."""

    statements: list[Statement]
    size: int
    call: RecentCall
    parent: RecentCall | None


def _made(start: CallStart, recent: Sequence[RecentCall]) -> _Made:
    parent, known = parent_of(start.request, recent)
    call = RecentCall(start.call_id, sharing(start.request, parent, known), first=known)
    before = parent.told if parent else None
    if before or has_results(conversation(start.request), known):
        call.told = told(call.request, before, known)
    if parent is not None:
        stored = encode(shrink_request(call.request, parent.request))
    else:
        stored = encode(start.request) if start.request_text is None else start.request_text
    statements = [*_start_statements(start, parent, stored), *_tool_results(start, call, parent, known)]
    return _Made(statements, len(stored), call, parent)


def _start_statements(start: CallStart, parent: RecentCall | None, stored: bytes) -> list[Statement]:
    rollout_id = start.rollout.rollout_id
    large = len(stored) > LARGE_REQUEST
    row = {
        "rollout_id": rollout_id,
        "task_id": start.rollout.task_id,
        "agent": start.rollout.agent,
        "mode": start.rollout.mode,
        "key_id": start.rollout.key_id,
        "evidence": start.rollout.evidence,
        "policy_version": start.policy_version,
        "pin": start.policy_version if start.pins else None,
        "at": start.started_at,
        "call_id": start.call_id,
        "parent_id": parent.call_id if parent else None,
        "endpoint": start.endpoint,
        "upstream": start.upstream,
        "model": start.model,
        "request": None if large else stored,
        "large_request": stored,
    }
    statements: list[Statement] = [(ROLLOUT_SEEN, row), (CALL_START, row)]
    if large:
        statements.append((CALL_LARGE_REQUEST, row))
    return statements


def _tool_calls(end: CallEnd, call: RecentCall | None) -> list[Statement]:
    """The tool calls of an answer. `call`: what was asked; None if that is not known, and so not where they stand."""
    if end.tool_calls and call is not None and call.told is None:
        call.told = told(call.request)
    found = spots(call.told, end.response, end.tool_calls) if call is not None and call.told is not None else []
    placed = [{"place": spot.place, "signs": spot.signs} for spot in found] or [{"place": None, "signs": None}]
    return [
        (
            TOOL_CALL,
            {"rollout_id": end.rollout_id, "call_id": end.call_id, "position": position}
            | {"tool_call_id": tool.id, "name": tool.name, "arguments": tool.arguments}
            | placed[min(position, len(placed) - 1)],
        )
        for position, tool in enumerate(end.tool_calls)
    ]


def _tool_results(start: CallStart, call: RecentCall, parent: RecentCall | None, known: int) -> Iterator[Statement]:
    """The results that a request brings, after the first `known` messages."""
    for result, spot, is_old in results(call.told, known) if call.told else ():
        if result.tool_call_id is None and spot.place is None:
            continue  # nothing tells whose it is
        content = dumps(result.content)
        yield (
            TOOL_RESULT,
            spot._asdict()
            | {"rollout_id": start.rollout.rollout_id, "agent": start.rollout.agent}
            | {"tool_call_id": result.tool_call_id, "is_error": result.is_error, "result": content}
            # A call of the same name and arguments that only a counted id leads to may be another conversation's.
            | {"telling": UNIQUE if is_unique(result.tool_call_id or "") else COUNTED}
            | {"least": 0 if spot.what is None else FITS, "known": content if parent is None or is_old else None},
        )
