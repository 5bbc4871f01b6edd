"""Keeps the last calls of each rollout, in a limited amount of memory.

`RecentCalls` has calls as recorded, to find a new call's parent. `History` has answered calls, to find the one that a
new call continues. These are unredacted unless they were read from the store.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ...core.errors import NotFound
from ...core.records import CallEnd, ModelCall
from ...core.tools import conversation
from ...store.requests import Parent, newest_parents, same_prefix
from ...store.store import Store
from ..dialects.as_chat.recorded import Exchange, by_response, chat_answer, exchanges_up_to
from ..dialects.turns import TokenTurn, turn_of

A_CALL, A_MESSAGE, AN_ENTRY = 1_500, 50, 24  # bytes without content: of a call, a message, its entry in a list
LATELY, EVERY = 64, 2**31 - 1  # how many of a rollout's calls are read to find answers of other workers
TURNS = 8  # of a rollout, that are kept

Json = dict[str, Any]
Kept = TypeVar("Kept")
# A recorded call as a chat request, given its rollout's exchanges by response; None if it is not one.
ChatOf = Callable[[ModelCall, Mapping[str, Exchange]], Json | None]


class RolloutMemory(Generic[Kept]):
    """Keeps a value for each rollout, about `most` bytes in all. The least recently kept are dropped first."""

    def __init__(self, most: int) -> None:
        self._kept: OrderedDict[str, tuple[Kept, int]] = OrderedDict()
        self._most = most
        self.size = 0

    def get(self, rollout_id: str) -> Kept | None:
        return self._kept[rollout_id][0] if rollout_id in self._kept else None

    def keep(self, rollout_id: str, value: Kept, size: int) -> None:
        self.forget(rollout_id)
        self._kept[rollout_id] = value, size
        self.size += size
        while self.size > self._most:
            self.forget(next(iter(self._kept)))

    def forget(self, rollout_id: str) -> None:
        if rollout_id in self._kept:
            self.size -= self._kept.pop(rollout_id)[1]


@dataclass(slots=True)
class RecentCall:
    """A call that may become a parent. `row_ids`: the tokens of its prompt and answer, once durable.

    `places`: the places of its messages (`places_of`), if there are tool calls. Sizes in bytes: `ends`, the running
    total over its messages; `fields`, of each other field; `size`, of the entire request; `own`, without the objects
    that it shares with its parent (`sharing`).
    """

    call_id: str
    request: Json
    started_at: float = 0.0
    places: list[bytes] | None = None
    row_ids: array[int] = field(default_factory=partial(array, "i"))
    ends: array[int] = field(default_factory=partial(array, "q"))
    fields: dict[str, int] = field(default_factory=dict)
    parent_id: str = ""
    size: int = 0
    own: int = 0

    def measure(self, parent: RecentCall | None, shared_messages: int) -> None:
        """Measure the request's bytes. What it shares with its parent is not measured again."""
        messages, parent = conversation(self.request), parent or RecentCall("", {})
        self.parent_id, self.ends = parent.call_id, parent.ends[:shared_messages]
        end = shared = self.ends[-1] if self.ends else 0
        for message in messages[shared_messages:]:
            end += A_MESSAGE + taken(message)
            self.ends.append(end)
        for name, value in self.request.items():
            if value is not messages:
                known = parent.fields.get(name, 0) if value is parent.request.get(name) else 0
                self.fields[name] = known or taken(value)
                shared += known
        self.size = end + sum(self.fields.values())
        self.own = self.size - shared


def taken(value: Any, most: int = 2**27) -> int:
    """Return about how many bytes a JSON value takes in memory. Stops counting at `most`.

    It adds up lengths: `sys.getsizeof` is four times slower. Characters take one byte in ASCII texts, else up to four.
    """
    size, found = 0, [value]
    for one in found:  # it grows meanwhile
        if type(one) is str:
            size += 50 + len(one) * (1 if one.isascii() else 4)
        elif type(one) is dict:
            size += 64 + 50 * len(one) + sum(map(len, one))
            found += one.values()
        elif type(one) is list:
            size += 56 + 8 * len(one)
            found += one
        else:
            size += 32
        if size >= most:
            break
    return size


class RecentCalls:
    """Keeps at most `each` calls per rollout, and about `memory` bytes in all."""

    def __init__(self, memory: int, each: int) -> None:
        self._calls = RolloutMemory[list[RecentCall]](memory)
        self._each = each
        self.forget = self._calls.forget

    def of(self, rollout_id: str) -> list[RecentCall]:
        """Return the recent calls of the rollout, newest last."""
        return self._calls.get(rollout_id) or []

    def add(self, rollout_id: str, call: RecentCall) -> None:
        """Keep a call that has been measured."""
        self._keep(rollout_id, [*self.of(rollout_id), call][-self._each :])

    def ended(self, end: CallEnd) -> None:
        """Keep the tokens of a call that has ended, if the call is still kept."""
        calls = self.of(end.rollout_id)
        if end.choices and (call := next((one for one in calls if one.call_id == end.call_id), None)) is not None:
            call.row_ids = array("i", end.prompt_token_ids + end.choices[0].token_ids)
            self._keep(end.rollout_id, calls)

    def _keep(self, rollout_id: str, calls: list[RecentCall]) -> None:
        there, size = {call.call_id for call in calls}, 0
        for call in calls:
            size += A_CALL + AN_ENTRY * len(call.ends) + len(call.row_ids) * call.row_ids.itemsize
            size += call.own if call.parent_id in there else call.size
        self._calls.keep(rollout_id, calls, size)


def parent_of(request: Json, recent: Sequence[RecentCall]) -> tuple[RecentCall | None, int]:
    """Return the recent call, if any, that shares the most leading messages with the request, and their number."""
    messages, parent, most = conversation(request), None, 0
    for call in reversed(recent):
        before = conversation(call.request)
        if len(before) >= most and (shared := same_prefix(messages, before)) >= most:
            parent, most = call, shared
    return parent, most


def sharing(request: Json, parent: RecentCall | None, shared_messages: int) -> Json:
    """Return the request with its first messages replaced by the parent's objects, so that memory holds them once."""
    if parent is None or not shared_messages:
        return request
    messages = conversation(parent.request)[:shared_messages] + conversation(request)[shared_messages:]
    return request | {"messages" if "messages" in request else "input": messages}


@dataclass(slots=True)
class Answered:
    """What is kept of a rollout's answered calls. `seen`: the ids of these calls.

    `turns`: the newest calls as tokens, newest last. `exchanges`: the Responses calls, by response id. `parents`: the
    newest calls that were read from the store.
    """

    seen: set[str] = field(default_factory=set)
    turns: list[TokenTurn] = field(default_factory=list)
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    parents: dict[str, Parent] = field(default_factory=dict)

    @property
    def size(self) -> int:
        sizes = (one.size for kept in (self.turns, self.exchanges.values()) for one in kept)
        return A_CALL + sum(sizes) + sum(len(parent.tokens) for parent in self.parents.values())


class History:
    """Keeps the answered calls of recently used rollouts. Those of other rollouts and workers come from the store."""

    def __init__(self, store: Store, chat_of: ChatOf | None, *, memory: int = 2**27) -> None:
        """`chat_of` returns a recorded call's chat request. Without it, calls from the store do not become turns."""
        self._calls = store.calls
        self._chat_of: ChatOf = chat_of or (lambda _call, _known: None)
        self._kept = RolloutMemory[Answered](memory)
        self.forget = self._kept.forget

    def known(self, rollout_id: str) -> Answered:
        """Return what is in memory for the rollout, and mark it as recently used."""
        kept = self._kept.get(rollout_id) or Answered()
        self._kept.keep(rollout_id, kept, kept.size)
        return kept

    async def read(self, rollout_id: str, newest: int = LATELY) -> Answered:
        """Read the answered calls among the rollout's last `newest` into memory, and return all that are in memory."""
        before = self.known(rollout_id).seen.copy()
        answered = await self._calls.answered(rollout_id, newest)
        if not answered:  # it was deleted, perhaps by another process
            self.forget(rollout_id)
        kept = self.known(rollout_id)
        while unseen := answered - kept.seen:
            read = await self._calls.some(unseen, kept.parents)
            exchanges, made = await asyncio.to_thread(self._made, read, kept.exchanges.copy())
            if kept.seen.isdisjoint(unseen):  # else some were noted meanwhile, by `add` or another `read`
                kept.seen |= unseen
                kept.exchanges = exchanges | kept.exchanges  # these are unredacted
                kept.parents = newest_parents(kept.parents, read)
                kept.turns = [*kept.turns, *made][-TURNS:]
                self._kept.keep(rollout_id, kept, kept.size)
        kept.seen -= before - answered  # what `add` noted meanwhile is not among these
        return kept

    async def up_to(self, rollout_id: str, response_id: str) -> list[Exchange]:
        """Return the exchanges up to a response, oldest first. Raise NotFound if the response is unknown."""
        with suppress(NotFound):
            return exchanges_up_to((await self.read(rollout_id)).exchanges, response_id)
        return exchanges_up_to((await self.read(rollout_id, EVERY)).exchanges, response_id)

    def add(
        self, rollout_id: str, call_id: str, turn: TokenTurn | None = None, exchange: Exchange | None = None
    ) -> None:
        """Note that a call was answered, and that its record is durable."""
        kept = self.known(rollout_id)
        kept.seen.add(call_id)
        if exchange is not None:
            kept.exchanges[exchange.response_id] = exchange
        if turn is not None:
            kept.turns = [*kept.turns, turn][-TURNS:]
        self._kept.keep(rollout_id, kept, kept.size)

    def _made(
        self, calls: Sequence[ModelCall], known: dict[str, Exchange]
    ) -> tuple[dict[str, Exchange], list[TokenTurn]]:
        """The exchanges of recorded calls, and the newest `TURNS` of their turns."""
        exchanges = by_response(call for call in calls if call.endpoint == "responses")
        made, known = list[TokenTurn](), exchanges | known
        for call in reversed(calls):
            if len(made) < TURNS and call.policy_version is not None and (chat := self._chat_of(call, known)):
                answer = chat_answer(call.endpoint, call.response)
                turn = turn_of(chat, answer, call.prompt_token_ids, call.choices)
                made += [turn] if turn else []
        return exchanges, made[::-1]
