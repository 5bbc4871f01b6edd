"""Keeps recent calls of each rollout in memory, so that a later call is stored as its difference from one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..apis.tools import conversation
from ..store.requests.delta import same_prefix
from ..types import CallEnd
from .places import Told


@dataclass(slots=True)
class RecentCall:
    """A call that may become a parent. `row_ids`: the tokens of its prompt and answer, once they are durable.

    `told`: what its request tells of its conversation, where there are tool calls. `first`: its first message that it
    does not share with an earlier call. `size`: about how many bytes it takes from there on.
    """

    call_id: str
    request: dict[str, Any]
    row_ids: array[int] = field(default_factory=lambda: array("i"))
    told: Told | None = None
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
    """Return how many bytes of a call's text go with it. The rest is counted with the call that shares most of it."""
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
    """Return how many messages two lists have in common from the first on, as the same objects."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda n: one[n] is not other[n])


def parent_of(request: dict[str, Any], recent: Sequence[RecentCall]) -> tuple[RecentCall | None, int]:
    """Return the recent call that the request has most in common with, and how many messages that is."""
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
