"""Remembers the recent calls of each rollout, among which a new call finds its parent."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...core.records import CallEnd
from ...core.tools import conversation
from ...store.requests import same_prefix
from .places import ReadRequest, RequestItems

A_CALL, A_MESSAGE = 1_500, 50  # bytes that they take beside their content


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
        """Remember the tokens of a call that has ended, if it is still remembered, and what nobody needs no more."""
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
