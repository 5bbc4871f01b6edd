"""Records calls: their start before they are sent upstream, their end before the answer's last byte.

`start` returns when the record is committed; what `end` returns is done when that is. Where too many records wait,
further calls do too.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..apis.marks import is_unique
from ..apis.tools import conversation, has_results
from ..aside import aside
from ..errors import StoreUnavailable
from ..json_text import dumps, dumps_or_none, encode
from ..store.calls import (
    CALL_END,
    CALL_LARGE_REQUEST,
    CALL_START,
    CALL_SUPERSEDED,
    ROLLOUT_CALL_ENDED,
    TOOL_CALL,
    TOOL_RESULT,
)
from ..store.database import ConstraintRefused
from ..store.requests.delta import (
    common_prefix,
    pack_floats,
    pack_ids,
    same_prefix,
    shrink_request,
)
from ..store.requests.parents import Parent
from ..store.rollouts import ROLLOUT_SEEN
from ..store.store import Store
from ..types import CallEnd, CallStart, Choice, ModelCall
from .group_commit import GroupCommit, Statement
from .places import ReadRequest, read_request, results, spots
from .redact import Redactor

LARGE_REQUEST = 4_000  # bytes of a request that is stored apart from its call
# How much an id proves whose call it is, beside the signs of TOOL_RESULT; and how much a resent call needs.
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
        self._slots = asyncio.Semaphore(starts)
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
        done.add_done_callback(partial(self._ended, end, was_trainable))
        return done

    def forget(self, rollout_id: str) -> None:
        """Drop a deleted rollout from memory, so that no later call is stored as a difference from its calls."""
        self._recent.forget(rollout_id)

    async def _start(self, start: CallStart, also: Sequence[Statement], size: int) -> None:
        rollout_id = start.rollout.rollout_id
        recent = self._recent.of(rollout_id)
        made = await aside(size, partial(_prepared, start, recent))
        parent, statements = made.parent, [*made.statements, *also]
        if start.is_retry and (earlier := await self._repeated(start, recent)):
            statements.append((CALL_SUPERSEDED, {"call_id": start.call_id, "earlier": earlier.call_id}))
        try:
            async with self._slots:
                await self._writer.put(statements, made.size)
        except StoreUnavailable as error:
            if parent is None or not isinstance(error.__cause__, ConstraintRefused):
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


class _Prepared(NamedTuple):
    """The statements of a call's start, of `size` bytes, and the call and its parent as they are remembered."""

    statements: list[Statement]
    size: int
    call: RecentCall
    parent: RecentCall | None


def _prepared(start: CallStart, recent: Sequence[RecentCall]) -> _Prepared:
    parent, known = parent_of(start.request, recent)
    call = RecentCall(start.call_id, sharing(start.request, parent, known), first=known)
    before = parent.read if parent else None
    if before or has_results(conversation(start.request), known):
        call.read = read_request(call.request, before, known)
    if parent is not None:
        stored = encode(shrink_request(call.request, parent.request))
    else:
        stored = encode(start.request) if start.request_text is None else start.request_text
    statements = [*_start_statements(start, parent, stored), *_tool_results(start, call, parent, known)]
    return _Prepared(statements, len(stored), call, parent)


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
    """The tool calls of an answer. `call`: None if its request is not known; then their places are not, either."""
    if not end.tool_calls:
        return []
    if call is not None and call.read is None:
        call.read = read_request(call.request)
    found = spots(call.read, end.response, end.tool_calls) if call is not None and call.read is not None else []
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
    for result, spot, is_old in results(call.read, known) if call.read else ():
        if result.tool_call_id is None and spot.place is None:
            continue  # it cannot be told whose result it is
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


@dataclass(slots=True)
class RecentCall:
    """A call that may become a parent. `row_ids`: the tokens of its prompt and answer, once they are durable.

    `read`: its request, read, where there are tool calls. `first`: its first message that it does not
    share with an earlier call. `size`: about how many bytes it takes from there on.
    """

    call_id: str
    request: dict[str, Any]
    row_ids: array[int] = field(default_factory=partial(array, "i"))
    read: ReadRequest | None = None
    first: int = 0
    size: int = 0


@dataclass(slots=True)
class _OfRollout:
    """A rollout's recent calls, newest last. `size`: about how many bytes they take, what they share counted once."""

    calls: list[RecentCall] = field(default_factory=list)
    size: int = 0


class RecentCalls:
    """At most `each` calls of every rollout, and about `memory` bytes in all; quiet rollouts are forgotten first."""

    def __init__(self, memory: int, each: int) -> None:
        self._rollouts: OrderedDict[str, _OfRollout] = OrderedDict()
        self._memory = memory
        self._each = each
        self._kept = 0

    def of(self, rollout_id: str) -> list[RecentCall]:
        """Return the recent calls of the rollout, newest last."""
        recent = self._rollouts.get(rollout_id)
        return list(recent.calls) if recent else []

    def add(self, rollout_id: str, call: RecentCall, size: int) -> None:
        """Remember a call that has `size` bytes more than its parent."""
        recent = self._rollouts.setdefault(rollout_id, _OfRollout())
        self._rollouts.move_to_end(rollout_id)
        call.size = size
        recent.calls.append(call)
        while len(recent.calls) > self._each:
            forgotten = recent.calls.pop(0)
            self._count(recent, -_freed(forgotten, recent.calls) - len(forgotten.row_ids) * forgotten.row_ids.itemsize)
        self._count(recent, size)

    def add_tokens(self, end: CallEnd) -> None:
        """Remember the tokens of a call that has ended, if it is still remembered."""
        recent = self._rollouts.get(end.rollout_id)
        if recent is None or not end.choices:
            return
        for call in recent.calls:
            if call.call_id == end.call_id:
                call.row_ids = array("i", end.prompt_token_ids + end.choices[0].token_ids)
                self._count(recent, len(call.row_ids) * call.row_ids.itemsize)

    def forget(self, rollout_id: str) -> None:
        if (recent := self._rollouts.pop(rollout_id, None)) is not None:
            self._kept -= recent.size

    def _count(self, recent: _OfRollout, size: int) -> None:
        recent.size += size
        self._kept += size
        while self._kept > self._memory and self._rollouts:
            self._kept -= self._rollouts.popitem(last=False)[1].size


def _freed(forgotten: RecentCall, kept: Sequence[RecentCall]) -> int:
    """Return how many bytes forgetting a call frees. The rest is counted with the call that shares most of it."""
    messages = conversation(forgotten.request)
    sharing_it = ((_same(messages, conversation(call.request)), call) for call in kept)
    shared, heir = max(sharing_it, key=lambda one: one[0], default=(0, forgotten))
    own, left = len(messages) - forgotten.first, shared - forgotten.first
    if left <= 0:
        return forgotten.size
    inherited = forgotten.size * left // own
    heir.first, heir.size = min(heir.first, forgotten.first), heir.size + inherited
    return forgotten.size - inherited


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many messages two lists share from the first on, as the same objects."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda n: one[n] is not other[n])


def parent_of(request: dict[str, Any], recent: Sequence[RecentCall]) -> tuple[RecentCall | None, int]:
    """Return the recent call that shares most messages with the request, and how many."""
    messages, parent, known = conversation(request), None, 0
    for call in reversed(recent):
        before = conversation(call.request)
        if len(before) >= known and (shared := same_prefix(messages, before)) >= known:
            parent, known = call, shared
    return parent, known


def sharing(request: dict[str, Any], parent: RecentCall | None, known: int) -> dict[str, Any]:
    """Return the request with its first `known` messages taken from its parent: they are kept in memory once."""
    if parent is None or not known:
        return request
    messages = conversation(parent.request)[:known] + conversation(request)[known:]
    return request | {"messages" if "messages" in request else "input": messages}


def call_end_row(end: CallEnd, prompt_shared: int, merged: bool) -> dict[str, Any]:
    """Parameters of CALL_END. The first `prompt_shared` prompt tokens are those of the parent's row."""
    first = end.choices[0] if end.choices else Choice(0)
    more = [[c.index, c.token_ids, c.logprobs, c.finish_reason] for c in end.choices[1:]]
    return end._asdict() | {
        "response": dumps_or_none(end.response),
        "usage": dumps_or_none(end.usage),
        "merged": merged,
        "prompt_shared": prompt_shared,
        "prompt_ids": pack_ids(end.prompt_token_ids[prompt_shared:]),
        "token_ids": pack_ids(first.token_ids),
        "logprobs": pack_floats(first.logprobs),
        "finish_reason": first.finish_reason,
        "more_choices": dumps_or_none(more or None),
        "tokens": sum(len(c.token_ids) for c in end.choices),
    }
