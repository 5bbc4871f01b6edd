"""Remembers the recent calls of each rollout, for a new call's parent; tells which tool calls its results belong to."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...core.records import CallEnd, ToolCall, ToolResult
from ...core.tools import calls_in, conversation, is_answer, results_in, written_results
from ...store.requests import same_prefix
from ..dialects.atoms import digest, item_atoms, same_arguments

A_CALL, A_MESSAGE, AN_ENTRY = 1_500, 50, 24  # bytes beside content: of a call, of a message, of it in a list

Json = dict[str, Any]


@dataclass(slots=True)
class RecentCall:
    """A call that may become a parent. `row_ids`: the tokens of its prompt and answer, once they are durable.

    `places`: of its messages, as `places_of` returns them, where there are tool calls. `ends`: how many bytes its
    messages take up to each one's end; `fields`: how many each other field takes, by its `id`.
    """

    call_id: str
    request: Json
    started_at: float = 0.0
    places: list[bytes] | None = None
    row_ids: array[int] = field(default_factory=partial(array, "i"))
    ends: array[int] = field(default_factory=partial(array, "q"))
    fields: dict[int, int] = field(default_factory=dict)

    def measure(self, parent: RecentCall | None, shared_messages: int) -> None:
        """Note how many bytes the request takes. What it shares with its parent was measured there."""
        messages, known = conversation(self.request), {} if parent is None else parent.fields
        self.ends = parent.ends[:shared_messages] if parent is not None else self.ends
        for message in messages[shared_messages:]:
            self.ends.append((self.ends[-1] if self.ends else 0) + A_MESSAGE + taken(message))
        others = [value for value in self.request.values() if value is not messages]
        self.fields = {id(value): known.get(id(value)) or taken(value) for value in others}


def taken(value: Any, most: int = 2**27) -> int:
    """Return how many bytes a JSON value takes in memory, about. It stops counting at `most`.

    By lengths: `sys.getsizeof` takes four times as long. CPython has a byte for a character of ASCII, else up to four.
    """
    size, left = 0, [value]
    while left and size < most:
        one = left.pop()
        if type(one) is dict:
            size += 64 + 50 * len(one) + sum(map(len, one))
            left += one.values()
        elif type(one) is list:
            size += 56 + 8 * len(one)
            left += one
        elif type(one) is str:
            size += 50 + len(one) * (1 if one.isascii() else 4)
        else:
            size += 32
    return size


def size_of(calls: Sequence[RecentCall]) -> int:
    """Return about how many bytes a rollout's calls take, which were measured. What several share counts once.

    They share the objects of their first messages and of fields (`sharing`). Example:

        call 1   messages A (100 bytes), B (50)      150 bytes and A_CALL
        call 2   messages A, B, C (30)                30 bytes and A_CALL, or 180 once call 1 is forgotten
    """
    size, fields = 0, dict[int, int]()
    for i, call in enumerate(calls):
        messages = conversation(call.request)
        shared = max((_same(messages, conversation(earlier.request)) for earlier in calls[:i]), default=0)
        size += A_CALL + AN_ENTRY * len(messages) + len(call.row_ids) * call.row_ids.itemsize
        size += (call.ends[-1] if messages else 0) - (call.ends[shared - 1] if shared else 0)
        fields |= call.fields
    return size + sum(fields.values())


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many messages two lists share from the first on, as the same objects."""
    length = min(len(one), len(other))
    if length and one[length - 1] is other[length - 1]:  # most conversations go on
        return length
    return bisect_left(range(length), True, key=lambda n: one[n] is not other[n])


@dataclass(slots=True)
class _OfRollout:
    calls: list[RecentCall] = field(default_factory=list)  # newest last
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

    def add(self, rollout_id: str, call: RecentCall) -> None:
        """Remember a call that was measured."""
        recent = self._rollouts.setdefault(rollout_id, _OfRollout())
        self._rollouts.move_to_end(rollout_id)
        recent.calls = [*recent.calls, call][-self._each :]
        self._count(recent, size_of(recent.calls) - recent.size)

    def ended(self, end: CallEnd) -> None:
        """Keep the tokens of a call that has ended, if it is still remembered."""
        if (recent := self._rollouts.get(end.rollout_id)) is None or not end.choices:
            return
        for call in recent.calls:
            if call.call_id == end.call_id:
                call.row_ids = array("i", end.prompt_token_ids + end.choices[0].token_ids)
                self._count(recent, len(call.row_ids) * call.row_ids.itemsize)

    def _count(self, recent: _OfRollout, more_bytes: int) -> None:
        recent.size += more_bytes
        self._kept += more_bytes
        while self._kept > self._memory and self._rollouts:
            self._kept -= self._rollouts.popitem(last=False)[1].size

    def forget(self, rollout_id: str) -> None:
        if (recent := self._rollouts.pop(rollout_id, None)) is not None:
            self._kept -= recent.size


def parent_of(request: Json, recent: Sequence[RecentCall]) -> tuple[RecentCall | None, int]:
    """Return the recent call that shares most messages with the request, and how many."""
    messages, parent, most = conversation(request), None, 0
    for call in reversed(recent):
        before = conversation(call.request)
        if len(before) >= most and (shared := same_prefix(messages, before)) >= most:
            parent, most = call, shared
    return parent, most


def sharing(request: Json, parent: RecentCall | None, shared_messages: int) -> Json:
    """Return the request with these first messages taken from its parent: they are kept in memory once."""
    if parent is None or not shared_messages:
        return request
    messages = conversation(parent.request)[:shared_messages] + conversation(request)[shared_messages:]
    return request | {"messages" if "messages" in request else "input": messages}


def places_of(request: Json, before: Sequence[bytes] = (), known: int = 0) -> list[bytes]:
    """Return a digest of the conversation before each message, and one of all of it.

    The first `known` messages are those of a request with the places `before`. Texts of the model do not count, as
    some clients drop what it says beside a call; nor do results, which some shorten later, or send late.
    """
    place = _after(b"", {"role": "system", "content": request.get("system", request.get("instructions"))})
    if isinstance(text := request.get("input"), str):
        place = _after(place, text)
    places = [*before[: known + 1]] if before and before[0] == place else [place]
    for item in conversation(request)[len(places) - 1 :]:
        places.append(_after(places[-1], item))
    return places


def _after(place: bytes, item: Any) -> bytes:
    for atom in item_atoms(item):
        if atom.kind == "call":
            place = after_call(place, atom.name, atom.what)
        elif atom.kind == "text" and atom.who != "assistant":
            place = digest("", place, atom.who, atom.what)
    return place


def after_call(place: bytes, name: str, arguments: str) -> bytes:
    """Return the place after a tool call, whose id does not count: some clients write it anew."""
    return digest("", place, name, same_arguments(arguments))


class Brought(NamedTuple):
    """A result in a request, and what says which recorded call it belongs to.

    `call`: that call, as the request sends it again, if it does; `place`: where it stands. `answer`: an id that the
    answer with it has. `is_old`: an earlier request may have brought the result.
    """

    result: ToolResult
    call: ToolCall | None
    place: bytes
    answer: Any = None
    is_old: bool = False


class _Resent(NamedTuple):
    """The `n`th call that a request sends again, or refers to by an item's id; its answer begins with the `turn`th."""

    n: int
    turn: int
    call: ToolCall | None
    place: bytes
    item_id: str | None = None


def results(request: Json, places: Sequence[bytes], known: int) -> Iterator[Brought]:
    """Yield the results in the messages after the first `known`.

    A result belongs to the call with its id that the request sends again before it; without an id to the first one of
    the newest answer that has no result yet. Example, where the model counts ids anew in every answer:

        recorded   user: go                       answer: call f(1), id f:0; call f(2), id f:0
        recorded   user: stop                     answer: call f(1), id f:0
        sent       user: go · call f(1), id f:0 · call f(2), id f:0 · result a, id f:0 · result b, id f:0

    a is of the call f(1) after "go", not of the one after "stop"; b is of the call that stands after "go" and f(1).
    """
    items, previous = conversation(request), request.get("previous_response_id")
    newest_answer = next((i for i in range(len(items) - 1, -1, -1) if is_answer(items[i])), -1)
    waiting = defaultdict[str | None, deque[_Resent]](deque)  # of the newest answer with this id; None: with any
    done, answered, n, turn, after_calls = set[int](), set[str | None](), 0, 0, -1

    def waits(called: str | None, name: str | None) -> _Resent | None:
        for queue in (waiting[called], waiting[""]):
            while queue and queue[0].n in done:
                queue.popleft()
            if queue:
                named = (one for one in queue if one.n not in done and one.call and one.call.name == name)
                return next(named, queue[0]) if name else queue[0]
        return None

    for i in range(_first_call(items, known), len(items)):
        for call, place, item_id in _resent(items[i], places[i]):
            n += 1
            turn, after_calls = turn if i <= after_calls else n, i + 1
            for name in {None, (call and call.id) or ""}:
                if waiting[name] and waiting[name][-1].turn != turn:
                    waiting[name].clear()
                waiting[name].append(_Resent(n, turn, call, place, item_id))
        for result in results_in(items[i]):
            called, is_old = result.tool_call_id, not known or i < newest_answer
            if resent := waits(called, result.name):
                done.add(resent.n)
                answered.add(called)
                brought = Brought(result, resent.call, resent.place, resent.item_id, is_old)
            elif called is None or called in answered:
                continue
            else:
                brought = Brought(result, None, places[i], previous, is_old)
            if i >= known:
                yield brought
    before = max(known - 1, 0)
    for i, result in written_results(items[before:]):
        yield Brought(result, None, places[before + i])


def _resent(item: Any, place: bytes) -> Iterator[tuple[ToolCall | None, bytes, str | None]]:
    """The calls in an item, as `Brought` has them; or the one that it refers to by the id of an item of Responses."""
    for call in calls_in(item):
        yield call, place, None
        place = after_call(place, call.name, call.arguments)
    referred = item.get("id") if isinstance(item, dict) and item.get("type") == "item_reference" else None
    if isinstance(referred, str) and not referred.startswith(("msg_", "rs_")):
        yield None, place, referred


def _first_call(items: Sequence[Any], known: int) -> int:
    """Return where the first call stands that may have a result after the first `known` items."""
    wanted, made = set[str | None](), set[str | None]()
    for item in items[known:]:
        wanted |= {result.tool_call_id for result in results_in(item)} - made
        made |= _ids(item)
    begin = known
    while begin and (wanted or _ids(items[begin - 1])):
        begin -= 1
        wanted -= _ids(items[begin])
    return begin


def _ids(item: Any) -> set[str | None]:
    """The ids of the calls in an item. None is among them: a result without an id may be of any."""
    ids = {call.id for call in calls_in(item)}
    return ids | {None} if ids else ids
