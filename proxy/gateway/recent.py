"""Remembers the recent calls of each rollout: a new call finds its parent among them, and its results their tool calls.

The request that brings a result resends the call and the entire conversation before it. That identifies the call, also
where ids are missing, repeated within a turn, written anew by the client, or counted anew in every answer. Example:

    recorded   user: go                                   answer: call f(1), id f:0; call f(2), id f:0
    sent       user: go · call f(1) · call f(2) · result a · result b     b is of what stands after "go" and f(1)
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

from ...core.records import CallEnd, ToolCall, ToolResult
from ...core.tools import brings_result, conversation, dicts, item_ids, results_in, written_results
from ...store.calls import NO_SIGN, SIGN, SIGNS
from ...store.requests import same_prefix
from ..dialects.atoms import Atom, answer_atoms, item_atoms, request_atoms, same_arguments

A_CALL, A_MESSAGE = 1_500, 50  # bytes that they take beside their content

Json = dict[str, Any]
Signed = list[tuple[Atom, bytes]]  # atoms with their digests

NEAR = 2  # how many atoms right before a call help to identify it


@dataclass(slots=True)
class RecentCall:
    """A call that may become a parent. `row_ids`: the tokens of its prompt and answer, once they are durable.

    `read`: its request, read, where there are tool calls. `first_own`: its first message that it does not share with an
    earlier call. `ends`: how many bytes its messages take, up to each one's end. `own`: bytes of its other fields that
    it does not share.
    """

    call_id: str
    request: dict[str, Any]
    row_ids: array[int] = field(default_factory=partial(array, "i"))
    read: ReadRequest | None = None
    first_own: int = 0
    started_at: float = 0.0
    ends: array[int] = field(default_factory=partial(array, "q"))
    own: dict[str, int] = field(default_factory=dict)

    def measure(self, parent: RecentCall | None, same: Collection[str]) -> None:
        """Share the fields that are the `same` as the parent's, and measure what is its own."""
        if parent is not None:
            self.request = self.request | {name: parent.request[name] for name in same}
            self.ends = parent.ends[: self.first_own]
        messages, end = conversation(self.request), self.ends[-1] if self.ends else 0
        for message in messages[self.first_own :]:
            self.ends.append(end := end + taken(message))
        others = [name for name in self.request if name not in same]
        self.own = {name: taken(value) for name in others if (value := self.request[name]) is not messages}

    def bytes_from(self, message: int) -> int:
        """Return how many bytes it takes without its first messages, and without the fields that it shares."""
        own = len(self.ends) - message
        messages = self.ends[-1] - (self.ends[message - 1] if message else 0) if own > 0 else 0
        lists = 24 * len(self.ends) + len(self.row_ids) * self.row_ids.itemsize
        return A_CALL + lists + max(own, 0) * A_MESSAGE + messages + sum(self.own.values())


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


@dataclass(slots=True)
class _OfRollout:
    """A rollout's recent calls, newest last. `kept_bytes`: about how many they take, what they share counted once."""

    calls: list[RecentCall] = field(default_factory=list)
    kept_bytes: int = 0


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
        recent.calls.append(call)
        more = call.bytes_from(call.first_own)
        while len(recent.calls) > self._each:
            more -= _freed(recent.calls.pop(0), recent.calls)
        self._count(recent, more)

    def ended(self, end: CallEnd) -> None:
        """Keep the tokens of a call that has ended, if it is still remembered, and drop what nobody needs any more."""
        recent = self._rollouts.get(end.rollout_id)
        for call in recent.calls if recent else ():
            if call.call_id == end.call_id and recent:
                if call.read is not None:
                    call.read = call.read._replace(items=RequestItems(call.request))  # without what was read of them
                if end.choices:
                    call.row_ids = array("i", end.prompt_token_ids + end.choices[0].token_ids)
                    self._count(recent, len(call.row_ids) * call.row_ids.itemsize)

    def forget(self, rollout_id: str) -> None:
        if (recent := self._rollouts.pop(rollout_id, None)) is not None:
            self._kept -= recent.kept_bytes

    def _count(self, recent: _OfRollout, more_bytes: int) -> None:
        recent.kept_bytes += more_bytes
        self._kept += more_bytes
        while self._kept > self._memory and self._rollouts:
            self._kept -= self._rollouts.popitem(last=False)[1].kept_bytes


def _freed(forgotten: RecentCall, kept: Sequence[RecentCall]) -> int:
    """Return how many bytes forgetting a call frees. The rest is counted with the calls that share it."""
    messages = conversation(forgotten.request)
    sharing_it = ((_same(messages, conversation(call.request)), call) for call in kept)
    shared, heir = max(sharing_it, key=lambda one: one[0], default=(0, forgotten))
    if shared > forgotten.first_own:
        heir.first_own = min(heir.first_own, forgotten.first_own)
    for name in [*forgotten.own]:
        value = forgotten.request[name]
        sharing_field = (call for call in kept if call.request.get(name) is value and name not in call.own)
        if (other := next(sharing_field, None)) is not None:
            other.own[name] = forgotten.own.pop(name)
    return forgotten.bytes_from(max(shared, forgotten.first_own))


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many messages two lists share from the first on, as the same objects."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda n: one[n] is not other[n])


def parent_of(request: dict[str, Any], recent: Sequence[RecentCall]) -> tuple[RecentCall | None, int]:
    """Return the recent call that shares most messages with the request, and how many."""
    messages, parent, most = conversation(request), None, 0
    for call in reversed(recent):
        before = conversation(call.request)
        if len(before) >= most and (shared := same_prefix(messages, before)) >= most:
            parent, most = call, shared
    return parent, most


def sharing(request: dict[str, Any], parent: RecentCall | None, shared_messages: int) -> dict[str, Any]:
    """Return the request with these first messages taken from its parent: they are kept in memory once."""
    if parent is None or not shared_messages:
        return request
    messages = conversation(parent.request)[:shared_messages] + conversation(request)[shared_messages:]
    return request | {"messages" if "messages" in request else "input": messages}


class Spot(NamedTuple):
    """Where one tool call stands, as digests; None where that is not known.

    `place`: all of the conversation before it; `what`: its name and arguments; `near`: the last atoms of that; `root`:
    the first atom; `system`: the system's prompt; `response` and `item`: the ids that Responses gives.
    """

    place: bytes | None = None
    what: bytes | None = None
    near: bytes | None = None
    root: bytes | None = None
    system: bytes | None = None
    response: bytes | None = None
    item: bytes | None = None

    @property
    def signs(self) -> bytes:
        """Return all but the place, packed as the store compares them."""
        return b"".join(getattr(self, name) or NO_SIGN for name in SIGNS)


class RequestItems:
    """The messages or items of a request, each of them read at most once."""

    def __init__(self, request: Json) -> None:
        """An input that is a text is a user's message."""
        found = request.get("messages", request.get("input"))
        self.all: Sequence[Any] = [found] if isinstance(found, str) else found if isinstance(found, list) else []
        self._read: dict[int, list[Atom]] = {}
        self._signs: dict[int, Signed] = {}

    def atoms(self, i: int) -> list[Atom]:
        """Return an item's atoms."""
        if i not in self._read:
            self._read[i] = item_atoms(self.all[i])
        return self._read[i]

    def signed(self, i: int) -> Signed:
        """Return an item's atoms, each with its digest."""
        if i not in self._signs:
            self._signs[i] = _signed(self.atoms(i))
        return self._signs[i]

    def is_call(self, i: int) -> bool:
        """Return whether an item makes calls, or refers to one."""
        return bool(_references(self.all[i])) or any(atom.kind == "call" for atom in self.atoms(i))

    def tail(self, end: int) -> deque[bytes]:
        """Return digests of the last atoms before an item."""
        before = range(max(end - 2 * NEAR, 0), end)
        return deque((sign for i in before for atom, sign in self.signed(i) if atom.who != "system"), NEAR)

    @property
    def last_answer(self) -> int:
        """Return the place of the model's last answer; -1 if there is none."""
        found = ((i, atom) for i in range(len(self.all) - 1, -1, -1) for atom in self.atoms(i))
        return next((i for i, atom in found if atom.kind == "call" or atom.who == "assistant"), -1)


class ReadRequest(NamedTuple):
    """A request, read. `states`: a digest of the conversation before each item, and one of all of it.

    `spot`: what is the same for all calls in it. `first`: how many items were read for it.
    """

    items: RequestItems
    states: list[bytes]
    spot: Spot
    first: int


def read_request(request: Json, parent: ReadRequest | None = None, known: int = 0) -> ReadRequest:
    """Read a request. Its first `known` items are those of its parent, which need not be read again."""
    items = RequestItems(request)
    previous = request.get("previous_response_id")
    begun = sign("response", previous) if isinstance(previous, str) else b""
    states = [begun] if parent is None or parent.states[0] != begun else parent.states[: known + 1]
    for i in range(len(states) - 1, len(items.all)):
        states.append(_after(states[-1], items.signed(i)))
    if parent is not None and 0 < parent.first <= known and not ("system" in request or "instructions" in request):
        return ReadRequest(items, states, parent.spot._replace(response=begun or None), parent.first)
    texts = ((i, atom) for i in range(len(items.all)) for atom in items.atoms(i))
    first = next(((i, atom) for i, atom in texts if atom.kind == "text" and atom.who != "system"), None)
    root = None if first is None else _sign_of(first[1])
    spot = Spot(root=root, system=_system(request, items), response=begun or None)
    return ReadRequest(items, states, spot, 0 if first is None else first[0] + 1)


def sign(*parts: str | bytes) -> bytes:
    """Return a short digest of the parts."""
    raw = [part.encode(errors="replace") if isinstance(part, str) else part for part in parts]
    lengths = ",".join(map(str, map(len, raw)))
    return blake2b(b"".join([lengths.encode(), b":", *raw]), digest_size=SIGN).digest()


def spots(before: ReadRequest, response: Any, calls: Sequence[ToolCall]) -> list[Spot]:
    """Return where the tool calls of an answer stand, which was given after `before`."""
    if not calls:
        return []
    answers = list(answer_atoms(response)) if isinstance(response, dict) else []
    if sum(atom.kind == "call" for answer in answers for atom in answer) != len(calls):
        answers = [[Atom("call", call.id or "", call.arguments, call.name) for call in calls]]
    response_id = response.get("id") if isinstance(response, dict) else None
    everywhere = before.spot._replace(response=sign("response", response_id) if isinstance(response_id, str) else None)
    tail = before.items.tail(len(before.items.all))
    found = [spot for answer in answers for spot in _calls(_signed(answer), before.states[-1], tail, everywhere)]
    ids = item_ids(response)
    if len(ids) != len(found):
        return found
    return [spot._replace(item=_item_sign(item_id)) for spot, item_id in zip(found, ids, strict=True)]


class PlacedResult(NamedTuple):
    """A result in a request, where the call stands that it answers, and whether the model has answered since."""

    result: ToolResult
    spot: Spot
    is_old: bool


def results(request: ReadRequest, known: int) -> Iterator[PlacedResult]:
    """Yield the results after the first `known` items."""
    items = request.items.all
    if any(map(brings_result, items[known:])):
        yield from _Reader(request, known).results()
    for _, result in written_results(items[max(known - 1, 0) :]):
        yield PlacedResult(result, request.spot, False)


@dataclass(slots=True)
class _Called:
    """A call that a request resends. `turn` counts the answers that made calls."""

    id: str
    name: str
    turn: int
    spot: Spot
    is_answered: bool = False


class _Reader:
    """Reads the end of a conversation: the newest calls, and the items after them."""

    def __init__(self, request: ReadRequest, known: int) -> None:
        self._items, self._states, self._spot, _ = request
        self._known = known
        self._calls: list[_Called] = []
        self._waiting: dict[str, list[_Called]] = {}  # by id, in their order
        self._begin = self._beginning(known)

    def results(self) -> Iterator[PlacedResult]:
        turn, is_calling, answered = 0, False, self._items.last_answer
        tail = self._items.tail(self._begin)
        for i in range(self._begin, len(self._items.all)):
            item, atoms = self._items.all[i], self._items.atoms(i)
            made = [atom for atom in atoms if atom.kind == "call"] or _references(item)
            turn += bool(made) and not is_calling
            spots = _calls(self._items.signed(i), self._states[i], tail, self._spot)
            for atom in made:
                spot = self._spot._replace(item=_item_sign(atom.what)) if atom.kind == "item" else next(spots)
                self._calls.append(_Called(atom.who, atom.name, turn, spot))
                self._waiting.setdefault(atom.who, []).append(self._calls[-1])
            tail.extend(sign for atom, sign in self._items.signed(i) if atom.who != "system")
            if atoms or made:
                is_calling = bool(made)
            for result in results_in(item):
                spot = self._answered(result)
                if i >= self._known:
                    yield PlacedResult(result, spot, i < answered)

    def _beginning(self, known: int) -> int:
        """Where the newest turn with calls begins that a result after the first `known` items may answer."""
        i = known
        if i < len(self._items.all) and self._items.is_call(i):
            return i
        while i and brings_result(self._items.all[i - 1]):
            i -= 1
        while i and self._items.is_call(i - 1):
            i -= 1
        return i

    def _answered(self, result: ToolResult) -> Spot:
        """Where the call stands that this answers: by its id, else in the order of the newest turn's calls."""
        alike = self._waiting.get(result.tool_call_id) if result.tool_call_id else self._newest()
        if not alike:
            alike = self._waiting.get("", [])
        turn = [call for call in alike if call.turn == alike[-1].turn]
        if turn:
            call = next((call for call in turn if call.name == result.name), turn[0])
            call.is_answered = True
            self._waiting[call.id].remove(call)
            return call.spot
        again = (call.spot for call in reversed(self._calls) if call.id and call.id == result.tool_call_id)
        return next(again, None) or self._earlier(result.tool_call_id)

    def _newest(self) -> list[_Called]:
        """The calls of the newest turn that has any without a result."""
        newest = next((call.turn for call in reversed(self._calls) if not call.is_answered), None)
        from_last = takewhile(lambda call: newest is not None and call.turn >= newest, reversed(self._calls))
        return [call for call in from_last if not call.is_answered][::-1]

    def _earlier(self, tool_call_id: str | None) -> Spot:
        """Where a call stands that was made before the newest turn; else only what is the same everywhere."""
        for i in range(self._begin - 1 if tool_call_id else -1, -1, -1):
            atoms = self._items.atoms(i)
            called = [atom.who for atom in atoms if atom.kind == "call"]
            if tool_call_id in called:
                spots = [*_calls(self._items.signed(i), self._states[i], self._items.tail(i), self._spot)]
                return spots[called.index(tool_call_id)]
        return self._spot


def _calls(signed: Signed, state: bytes, tail: Iterable[bytes], everywhere: Spot) -> Iterator[Spot]:
    """Where each call among these atoms stands, which come after `state`."""
    last = deque(tail, NEAR)
    for atom, own in signed:
        if atom.kind == "call":
            yield everywhere._replace(place=sign(state), what=own, near=sign(*last))
        state = _after(state, [(atom, own)])
        last.append(own)


def _after(state: bytes, signed: Signed) -> bytes:
    """The digest with these atoms added. Results do not count: some clients shorten them later, or send them late."""
    for atom, own in signed:
        if atom.kind != "result" and atom.who != "system":
            state = sign(state, own)
    return state


def _signed(atoms: Iterable[Atom]) -> Signed:
    return [(atom, _sign_of(atom)) for atom in atoms]


def _sign_of(atom: Atom) -> bytes:
    """A digest of an atom, without the id of a call."""
    if atom.kind == "call":
        return sign("call", atom.name, same_arguments(atom.what))
    return sign(atom.kind, "" if atom.kind == "result" else atom.who, atom.what)


def _system(request: Json, items: RequestItems) -> bytes:
    named = request_atoms({name: request.get(name) for name in ("system", "instructions")})
    texts = [atom.what for atom in named]
    for i in range(len(items.all)):
        if not (atoms := items.atoms(i)) or atoms[0].who != "system":
            break
        texts += [atom.what for atom in atoms]
    return sign(*texts)


def _references(item: Any) -> list[Atom]:
    """A call that a request to Responses names by the id of its item, where it may be one."""
    found = dicts([item])
    named = found[0].get("id") if found and found[0].get("type") == "item_reference" else None
    is_call = isinstance(named, str) and not named.startswith(("msg_", "rs_"))
    return [Atom("item", "", named)] if isinstance(named, str) and is_call else []


def _item_sign(item_id: str | None) -> bytes | None:
    return None if item_id is None else sign("item", item_id)
