"""Records calls: their start before they are sent upstream, their end before the answer's last byte.

A plain call takes four statements: ROLLOUT_SEEN and CALL_START first, CALL_END and ROLLOUT_CALL_ENDED at its end.
Large requests, retries, tool calls and unnamed rollouts add more. `start` returns once its statements are committed;
the future that `end` returns is done once those of the end are. If too many records wait, new calls wait.

`GroupCommit` writes many records in one commit. Records that arrive during a commit wait for the next.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from ...core.errors import StoreUnavailable
from ...core.http import LARGE, in_thread_if_large
from ...core.json_text import dumps, dumps_or_none, encode
from ...core.prices import Used, used
from ...core.records import CallEnd, CallStart, Choice, RolloutName
from ...core.redact import Redactor
from ...core.tools import conversation, has_results
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
from ...store.database import SMALL, ConstraintRefused
from ...store.requests import Parent, common_prefix, pack_ids, shrink_request
from ...store.rollouts import ROLLOUT_SEEN
from ...store.store import Store
from ..dialects.atoms import is_unique
from ..dialects.results import after_call, places_of, results
from .recent import RecentCall, RecentCalls, parent_of, sharing

log = logging.getLogger(__name__)

LARGE_REQUEST = 4_000  # bytes of a request that is stored apart from its call

Json = dict[str, Any]
# One of the store's statements, with its parameters.
Statement = tuple[str, dict[str, Any]]
GROUP = 512  # records in one commit, at most
STARTS = 4096  # calls that may wait for the commit of their start; others wait before they are put

# A call's end comes only after its start was committed, so the statements of a group may be sorted by kind.
# Statements of features come last, in the order in which they were put.
_ORDER = {
    statement: place
    for place, statement in enumerate((
        ROLLOUT_SEEN, CALL_START, CALL_LARGE_REQUEST, CALL_SUPERSEDED, CALL_END,
        ROLLOUT_CALL_ENDED, TOOL_CALL, TOOL_RESULT, CONVERSATION_TIP, CONVERSATION_POINT,
        CONVERSATION_ORIGIN,
    ))
}  # fmt: skip


class Entry(NamedTuple):
    """A record that waits for its commit. `size`: about how many bytes it has."""

    statements: Sequence[Statement]
    size: int
    done: asyncio.Future[None]


class GroupCommit:
    """The only writer of a process's call records. Use it with `async with`; on exit it commits all waiting records."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[Entry] = deque()
        self._wanted = asyncio.Event()
        self._closing = False
        self._ended: str | None = None  # why nothing is written any more

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write_groups())
        return self

    async def __aexit__(self, *_: object) -> None:
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

    def put(self, statements: Sequence[Statement], size: int = SMALL) -> asyncio.Future[None]:
        """Queue a record. The returned future is done when the record is durable, or fails with StoreUnavailable."""
        entry = Entry(statements, size, asyncio.get_running_loop().create_future())
        if self._ended is None:
            self._waiting.append(entry)
            self._wanted.set()
        else:
            entry.done.set_exception(StoreUnavailable(self._ended))
        return entry.done

    async def _write_groups(self) -> None:
        group: list[Entry] = []
        try:
            while self._waiting or not self._closing:
                if not self._waiting:
                    self._wanted.clear()
                    await self._wanted.wait()
                    continue
                known = 0
                while known < len(self._waiting) < GROUP:  # calls that are ready now join the group
                    known = len(self._waiting)
                    await asyncio.sleep(0)
                group = [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP))]
                await self._write(group)
        except (Exception, asyncio.CancelledError) as error:  # a bug, or cancelled: let nobody wait forever
            why = "the writer was cancelled" if isinstance(error, asyncio.CancelledError) else error
            self._ended = f"records are no longer written: {why!s:.200}; start the proxy again"
            log.critical("%s", self._ended, exc_info=error)
            _resolve([*group, *self._waiting], StoreUnavailable(self._ended))
            self._waiting.clear()

    async def _write(self, group: Sequence[Entry]) -> None:
        """Commit the group, and notify those who wait for it."""
        by_statement: dict[str, list[Json]] = {}
        for entry in group:
            for statement, row in entry.statements:
                by_statement.setdefault(statement, []).append(row)
        runs = sorted(by_statement.items(), key=lambda run: _ORDER.get(run[0], len(_ORDER)))
        commit, size = self._store.database.commit, sum(entry.size for entry in group)
        try:
            try:
                await commit(runs, size)
            except UnicodeEncodeError:
                await commit([(statement, [*map(_readable, rows)]) for statement, rows in runs], size)
        except StoreUnavailable as error:
            _resolve(group, error)
        except Exception as error:
            if len(group) == 1:
                refused = StoreUnavailable(f"the call could not be recorded: {error!r}")
                refused.__cause__ = error
                _resolve(group, refused)
            else:
                for one in group:  # one of them cannot be stored at all; the others must not suffer for it
                    await self._write([one])
        else:
            _resolve(group)


class Recorder(GroupCommit):
    """Redacts the records of calls, turns them into statements, and commits them. Run it with `async with`.

    A request is redacted before it is compared with earlier ones, because those are known only as stored.
    `on_redacted` is called for every call that cannot be trained on because of redaction.
    """

    def __init__(
        self,
        store: Store,
        *,
        merged: bool | Callable[[], bool],
        redactor: Redactor | None = None,
        on_redacted: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(store)
        self._merged = merged if callable(merged) else lambda: merged
        self._redactor = redactor if redactor else None  # by default it has nothing to redact
        self._on_redacted = on_redacted
        self._slots = asyncio.Semaphore(STARTS)
        self._recent = RecentCalls(memory=2**27, each=4)
        self.forget = self._recent.forget  # a deleted rollout: no later call is stored as a difference from its calls
        self._begun: dict[str, _Begun] = {}  # the calls under way

    async def start(self, start: CallStart, also: Sequence[Statement] = ()) -> None:
        """Record a call as `incomplete`, together with `also`. Raises StoreUnavailable if that fails.

        If another process has deleted the call's parent meanwhile, the call is prepared again without a parent.
        """
        size, shown = LARGE if start.request_text is None else len(start.request_text), False
        if self._redactor is not None:
            start, shown = await in_thread_if_large(size, partial(self._redactor.start, start))
        rollout_id = start.rollout.rollout_id
        while True:
            recent = self._recent.of(rollout_id)
            statements, stored_bytes, call, parent = await in_thread_if_large(size, partial(_prepared, start, recent))
            statements += also
            if start.is_retry:
                known = {call.call_id: Parent(call.request, call.row_ids.tobytes()) for call in recent}
                if earlier := await self._store.calls.superseded(rollout_id, start.request, known, self._begun):
                    statements.append((CALL_SUPERSEDED, {"call_id": start.call_id, "earlier": earlier.call_id}))
            begun = _Begun(call, parent, shown)
            is_first = self._begun.setdefault(start.call_id, begun) is begun  # an imported one may come twice at once
            try:
                async with self._slots:
                    await self.put(statements, stored_bytes)
            except StoreUnavailable as error:  # then there is no end; after a cancellation there is one
                if is_first:
                    del self._begun[start.call_id]
                if parent is None or not isinstance(error.__cause__, ConstraintRefused):
                    raise
                self.forget(rollout_id)  # another process deleted the parent
            else:
                return self._recent.add(rollout_id, call)

    def resume(self, start: CallStart) -> None:
        """Take up a call whose start is recorded, perhaps by another process, so that its end can be recorded."""
        shown = False
        if self._redactor is not None:
            start, shown = self._redactor.start(start)
        call = RecentCall(start.call_id, start.request, started_at=start.started_at)
        self._begun[start.call_id] = _Begun(call, None, shown)

    def end(self, end: CallEnd, also: Sequence[Statement] = (), *, counted: bool = False) -> asyncio.Future[None]:
        """Record how a call ended, together with `also`. Count the call unless it is `incomplete` or already `counted`.

        The future is done when the outcome is durable, or fails with StoreUnavailable.
        """
        return self._put_end(*self._prepared_end(end, also, counted=counted))

    async def end_large(self, end: CallEnd, also: Sequence[Statement] = ()) -> asyncio.Future[None]:
        """Like `end`, with the work for a large request or answer in a thread."""
        return self._put_end(*await asyncio.to_thread(self._prepared_end, end, also))

    def _put_end(self, end: CallEnd, statements: list[Statement], stored_bytes: int) -> asyncio.Future[None]:
        def committed(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._recent.ended(end)

        done = self.put(statements, stored_bytes)
        done.add_done_callback(committed)
        return done

    def _prepared_end(
        self, end: CallEnd, also: Sequence[Statement], *, counted: bool = False
    ) -> tuple[CallEnd, list[Statement], int]:
        """The end as recorded, its statements, and about how many bytes they store."""
        (call, parent, shown), was_trainable = self._begun.pop(end.call_id, UNKNOWN), end.trainable
        if self._redactor is not None:
            end = self._redactor.end(end, shown=shown)
        if was_trainable and not end.trainable:
            self._on_redacted()
        shared = common_prefix(array("i", end.prompt_token_ids), parent.row_ids) if parent else 0
        first = end.choices[0] if end.choices else Choice(0)
        more = [[c.index, c.token_ids, c.logprobs, c.finish_reason] for c in end.choices[1:]]
        tokens = used(end.usage)
        if tokens is None and (end.prompt_token_ids or first.token_ids):
            tokens = Used(len(end.prompt_token_ids), output=len(first.token_ids))
        row = end._asdict() | {f"{name}_tokens": getattr(tokens, name, None) for name in Used._fields}
        row |= {
            "response": dumps_or_none(end.response),
            "usage": dumps_or_none(end.usage),
            "merged": self._merged() and not end.imported,
            "prompt_shared": shared,  # with the parent's row
            "prompt_ids": pack_ids(end.prompt_token_ids[shared:]),
            "token_ids": pack_ids(first.token_ids),
            "logprobs": array("f", first.logprobs).tobytes(),
            "finish_reason": first.finish_reason,
            "more_choices": dumps_or_none(more or None),
            "tokens": sum(len(c.token_ids) for c in end.choices) or (tokens or Used()).output,
        }
        large = "response", "prompt_ids", "token_ids", "logprobs", "more_choices"
        stored_bytes = sum(len(row[name] or "") for name in large)
        counts = [] if counted or end.status == "incomplete" else [(ROLLOUT_CALL_ENDED, row)]
        return end, [(CALL_END, row), *counts, *_tool_calls(end, call), *also], stored_bytes

    async def put_in_order(self, end: CallEnd) -> None:
        """Move an ended imported call to its place in time, and add the tool results that later calls have."""
        if not await self._store.calls.put_in_order(end.rollout_id, end.call_id) or not end.tool_calls:
            return
        calls = await self._store.calls.of(end.rollout_id)
        later = calls[1 + next(i for i, call in enumerate(calls) if call.call_id == end.call_id) :]

        def brought() -> list[Statement]:
            requests = [(RolloutName(end.rollout_id, agent=call.agent), call.request) for call in later]
            return [one for name, request in requests for one in _tool_results(name, request, places_of(request), 0)]

        await self.put(await asyncio.to_thread(brought))


class _Begun(NamedTuple):
    """A running call and its parent. `shown`: the model was shown something that is redacted in the record."""

    call: RecentCall | None
    parent: RecentCall | None
    shown: bool


UNKNOWN = _Begun(None, None, False)


def _prepared(
    start: CallStart, recent: Sequence[RecentCall]
) -> tuple[list[Statement], int, RecentCall, RecentCall | None]:
    """The statements for a call's start, about how many bytes they store, and the call and parent to remember."""
    if start.imported:  # it gets its place by time, and its parent stands before it
        recent = [call for call in recent if call.started_at <= start.started_at]
    parent, shared_messages = parent_of(start.request, recent)
    request = sharing(start.request, parent, shared_messages)
    if parent is not None:
        shrunk = shrink_request(request, parent.request)
        stored, counts = encode(shrunk), shrunk["shared"].items()
        same = [name for name, n in counts if not shrunk["new"][name] and n == len(parent.request[name])]
        request = request | {name: parent.request[name] for name in same}
    else:
        stored = encode(request) if start.request_text is None else start.request_text
    call = RecentCall(start.call_id, request, start.started_at)
    call.measure(parent, shared_messages)
    before = parent.places if parent else None
    if before or has_results(conversation(request), shared_messages):
        call.places = places_of(request, before or (), shared_messages)
    is_large = len(stored) > LARGE_REQUEST
    row = start._asdict() | start.rollout._asdict()
    row |= {"at": start.started_at, "pin": start.policy_version if start.pins else None}
    row["harness"] = dumps_or_none(start.harness)
    row |= {"parent_id": parent and parent.call_id, "request": None if is_large else stored, "large_request": stored}
    statements: list[Statement] = [(ROLLOUT_SEEN, row), (CALL_START, row)]
    if is_large:
        statements.append((CALL_LARGE_REQUEST, row))
    if call.places:
        statements += _tool_results(start.rollout, request, call.places, shared_messages)
    return statements, len(stored), call, parent


def _tool_calls(end: CallEnd, call: RecentCall | None) -> Iterator[Statement]:
    """The statements for an answer's tool calls. These have no places if `call` is None."""
    place = None
    if end.tool_calls and call is not None:
        call.places = call.places or places_of(call.request)
        place = call.places[-1]
    for position, tool in enumerate(end.tool_calls):
        row = {"rollout_id": end.rollout_id, "call_id": end.call_id, "position": position, "place": place}
        yield TOOL_CALL, row | {"tool_call_id": tool.id, "name": tool.name, "arguments": tool.arguments}
        place = None if place is None else after_call(place, tool.name, tool.arguments)


def _tool_results(rollout: RolloutName, request: Json, places: Sequence[bytes], known: int) -> Iterator[Statement]:
    """The statements for the tool results in a request's messages after the first `known`."""
    for result, call, place, answer, is_old in results(request, places, known):
        content = dumps(result.content)
        yield (
            TOOL_RESULT,
            {
                "rollout_id": rollout.rollout_id,
                "agent": rollout.agent,
                "place": place,
                "result": content,
                "is_error": result.is_error,
                "brought_before": content if is_old else None,
                "tool_call_id": result.tool_call_id,
                "is_unique": is_unique(result.tool_call_id or ""),
                "name": call and call.name,
                "arguments": call and call.arguments,
                "answer": f"%{answer}%" if isinstance(answer, str) else None,
            },
        )


def _readable(row: Json) -> Json:
    """The row with `?` in place of lone surrogates, which UTF-8 cannot encode."""
    return {name: v.encode(errors="replace").decode() if isinstance(v, str) else v for name, v in row.items()}


def _resolve(group: Sequence[Entry], error: StoreUnavailable | None = None) -> None:
    """Resolve the futures of these records: as committed, or as failed with `error`."""
    for entry in group:
        if not entry.done.done():  # cancelled: the agent left, and nobody waits any more
            entry.done.set_result(None) if error is None else entry.done.set_exception(error)
