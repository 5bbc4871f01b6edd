"""Remembers the recent calls of each rollout, among which a new call finds its parent."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..apis.tools import conversation
from ..store.requests.delta import same_prefix
from ..types import CallEnd
from .places import ReadRequest


@dataclass(slots=True)
class RecentCall:
    """A call that may become a parent. `row_ids`: the tokens of its prompt and answer, once they are durable.

    `read`: its request, read, where there are tool calls. `first_own`: its first message that it
    does not share with an earlier call. `own_bytes`: about how many it takes from there on.
    """

    call_id: str
    request: dict[str, Any]
    row_ids: array[int] = field(default_factory=partial(array, "i"))
    read: ReadRequest | None = None
    first_own: int = 0
    own_bytes: int = 0
    started_at: float = 0.0


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

    def add(self, rollout_id: str, call: RecentCall, own_bytes: int) -> None:
        """Remember a call that has `own_bytes` more than its parent."""
        recent = self._rollouts.setdefault(rollout_id, _OfRollout())
        self._rollouts.move_to_end(rollout_id)
        call.own_bytes = own_bytes
        recent.calls.append(call)
        while len(recent.calls) > self._each:
            forgotten = recent.calls.pop(0)
            self._count(recent, -_freed(forgotten, recent.calls) - len(forgotten.row_ids) * forgotten.row_ids.itemsize)
        self._count(recent, own_bytes)

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
            self._kept -= recent.kept_bytes

    def _count(self, recent: _OfRollout, more_bytes: int) -> None:
        recent.kept_bytes += more_bytes
        self._kept += more_bytes
        while self._kept > self._memory and self._rollouts:
            self._kept -= self._rollouts.popitem(last=False)[1].kept_bytes


def _freed(forgotten: RecentCall, kept: Sequence[RecentCall]) -> int:
    """Return how many bytes forgetting a call frees. The rest is counted with the call that shares most of it."""
    messages = conversation(forgotten.request)
    sharing_it = ((_same(messages, conversation(call.request)), call) for call in kept)
    shared, heir = max(sharing_it, key=lambda one: one[0], default=(0, forgotten))
    own, left = len(messages) - forgotten.first_own, shared - forgotten.first_own
    if left <= 0:
        return forgotten.own_bytes
    inherited = forgotten.own_bytes * left // own
    heir.first_own, heir.own_bytes = min(heir.first_own, forgotten.first_own), heir.own_bytes + inherited
    return forgotten.own_bytes - inherited


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
