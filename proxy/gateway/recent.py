"""Remembers the recent calls of each rollout, for a new call's parent; tells which tool calls its results belong to."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...core.records import CallEnd, ToolCall, ToolResult
from ...core.tools import calls_in, conversation, is_answer, results_in, written_results
from ...store.requests import same_prefix
from ..dialects.atoms import digest, item_atoms, same_arguments

A_CALL, A_PART, AN_ENTRY = (
    1_500,
    200,
    16,
)  # bytes that a call, its messages and fields, and their lists take beside content

Json = dict[str, Any]


@dataclass(slots=True)
class RecentCall:
    """A call that may become a parent. `row_ids`: the tokens of its prompt and answer, once they are durable.

    `places`: of its messages, as `places_of` returns them, where there are tool calls.
    """

    call_id: str
    request: Json
    started_at: float = 0.0
    places: list[bytes] | None = None
    row_ids: array[int] = field(default_factory=partial(array, "i"))

    def parts(self) -> list[Any]:
        """Return its messages and its other fields."""
        messages = conversation(self.request)
        return [*messages, *(value for value in self.request.values() if value is not messages)]


def taken(value: Any, most: int = 2**27) -> int:
    """Return how many bytes a JSON value takes in memory, about. It stops counting at `most`.

    By lengths: `sys.getsizeof` takes four times as long. CPython has a byte for a character of ASCII, else up to four.
    """
    size, left = 0, [value]
    while left and size < most:
        one = left.pop()
        if type(one) is dict:
            size += 64 + 50 * len(one)
            for name, item in one.items():
                size += len(name)
                if type(item) is str:
                    size += 50 + len(item) * (1 if item.isascii() else 4)
                else:
                    left.append(item)
        elif type(one) is list:
            size += 56 + 8 * len(one)
            left += one
        elif type(one) is str:
            size += 50 + len(one) * (1 if one.isascii() else 4)
        else:
            size += 32
    return size


class _OfRollout:
    """A rollout's recent calls, newest last, and about how many bytes they take. What they share is counted once.

    Calls share the objects of messages and fields (`sharing`). Example:

        call 1   messages A (100 bytes), B (50)     150 bytes, and A_CALL
        call 2   messages A, B, C (30)               30 more, and A_CALL; two calls hold A and B
        call 1 is forgotten                          frees A_CALL; call 2 still holds A and B
    """

    def __init__(self) -> None:
        self.calls: list[RecentCall] = []
        self.size = 0
        self._held: dict[int, list[int]] = {}  # by a part's `id`: how many calls hold it, and its bytes

    def add(self, call: RecentCall) -> None:
        self.calls.append(call)
        parts = call.parts()
        self.size += A_CALL + AN_ENTRY * len(parts)
        for part in parts:
            if (held := self._held.get(id(part))) is None:
                held = self._held[id(part)] = [0, A_PART + taken(part)]
                self.size += held[1]
            held[0] += 1

    def forget_oldest(self) -> None:
        call = self.calls.pop(0)
        parts = call.parts()
        self.size -= A_CALL + AN_ENTRY * len(parts) + len(call.row_ids) * call.row_ids.itemsize
        for part in parts:
            held = self._held[id(part)]
            held[0] -= 1
            if not held[0]:
                self.size -= self._held.pop(id(part))[1]


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
        recent = self._rollouts.setdefault(rollout_id, _OfRollout())
        self._rollouts.move_to_end(rollout_id)
        before = recent.size
        recent.add(call)
        if len(recent.calls) > self._each:
            recent.forget_oldest()
        self._count(recent.size - before)

    def ended(self, end: CallEnd) -> None:
        """Keep the tokens of a call that has ended, if it is still remembered."""
        recent = self._rollouts.get(end.rollout_id)
        for call in recent.calls if recent and end.choices else ():
            if call.call_id == end.call_id and recent:
                call.row_ids = array("i", end.prompt_token_ids + end.choices[0].token_ids)
                size = len(call.row_ids) * call.row_ids.itemsize
                recent.size += size
                self._count(size)

    def forget(self, rollout_id: str) -> None:
        if (recent := self._rollouts.pop(rollout_id, None)) is not None:
            self._kept -= recent.size

    def _count(self, more_bytes: int) -> None:
        self._kept += more_bytes
        while self._kept > self._memory and self._rollouts:
            self._kept -= self._rollouts.popitem(last=False)[1].size


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
    """A call that a request sends again, or refers to by an item's id. `turn`: where the answer with it begins."""

    turn: int
    call: ToolCall | None
    place: bytes
    item_id: str | None = None


def results(request: Json, places: Sequence[bytes], known: int) -> Iterator[Brought]:
    """Yield the results in the messages after the first `known`.

    A result belongs to the call with its id that the request sends again before it; without an id to the first one of
    the newest turn that has no result yet. Example, where the model counts ids anew in every answer:

        recorded   user: go                       answer: call f(1), id f:0; call f(2), id f:0
        recorded   user: stop                     answer: call f(1), id f:0
        sent       user: go · call f(1), id f:0 · call f(2), id f:0 · result a, id f:0 · result b, id f:0

    a is of the call f(1) after "go", not of the one after "stop"; b is of the call that stands after "go" and f(1).
    """
    items, previous = conversation(request), request.get("previous_response_id")
    newest_answer = next((i for i in range(len(items) - 1, -1, -1) if is_answer(items[i])), -1)
    waiting, answered, turn, after_calls = list[_Resent](), set[str | None](), 0, -1
    for i in range(_first_call(items, known), len(items)):
        if made := [*_resent(items[i], places[i])]:
            turn, after_calls = turn if i == after_calls else i, i + 1
            waiting += [_Resent(turn, *one) for one in made]
        for result in results_in(items[i]):
            called, is_old = result.tool_call_id, not known or i < newest_answer
            alike = [one for one in waiting if called is None or (one.call and one.call.id == called)]
            alike = alike or [one for one in waiting if one.call is None or not one.call.id]
            alike = [one for one in alike if one.turn == alike[-1].turn]
            named = [one for one in alike if one.call and one.call.name == result.name]
            for resent in (named or alike)[:1]:
                waiting.remove(resent)
                answered.add(called)
                if i >= known:
                    yield Brought(result, *resent[1:], is_old)
            if not alike and i >= known and called not in {None, *answered}:
                yield Brought(result, None, places[i], previous, is_old)
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
