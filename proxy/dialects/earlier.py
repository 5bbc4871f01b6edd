"""Finds the conversation that `previous_response_id` of a request to /v1/responses refers to."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...core.errors import NotFound
from ...core.json_text import encode
from ...core.records import CallEnd, CallStart, ModelCall
from ...core.redact import MASK, REASON
from ...core.tools import dicts
from ...store.requests import Parent, newest_parents
from ...store.store import Store

Json = dict[str, Any]
LATELY = 64  # calls of a rollout that are looked at for answers of other workers


class Exchange(NamedTuple):
    """The items that one call added to its conversation, after the response `previous`: input and output.

    `by_chat`: it went through the chat route, so the server does not know the response. `redacted`: its record lacks
    something of the input or output. `size`: bytes, about; 0 if not known yet.
    """

    call_id: str
    response_id: str
    items: list[Json]
    previous: Any
    by_chat: bool = True
    redacted: bool = False
    size: int = 0


class Earlier:
    """Keeps the exchanges of the rollouts used last in memory, unredacted. The store has all others."""

    def __init__(self, store: Store, *, memory: int = 2**25) -> None:
        """About `memory` bytes are kept."""
        self._calls = store.calls
        self._rollouts: OrderedDict[str, _Kept] = OrderedDict()
        self._memory = memory
        self._size = 0

    async def up_to(self, rollout_id: str, previous: str) -> list[Exchange]:
        """Return the exchanges up to a response, oldest first. Raise NotFound if it is unknown."""
        kept = self._rollouts.get(rollout_id, _Kept())
        with suppress(NotFound):
            found = exchanges_up_to(kept.exchanges, previous)
            if await self._calls.status(rollout_id, found[-1].call_id) is not None:
                return found
            self._forget(rollout_id)  # it was deleted, perhaps by another process
            kept = _Kept()
        if kept.exchanges:
            seen = {exchange.call_id for exchange in kept.exchanges.values()}
            others = await self._calls.answered(rollout_id, LATELY) - seen
            with suppress(NotFound):
                return await self._read(rollout_id, previous, await self._calls.some(others, kept.parents))
        try:
            calls = await self._calls.of(rollout_id)
        except NotFound:
            calls = []
        return await self._read(rollout_id, previous, calls)

    def has_lately(self, rollout_id: str, response_id: Any) -> bool:
        """Return whether a response is in memory, and went through the chat route."""
        kept = self._rollouts.get(rollout_id, _Kept())
        return isinstance(response_id, str) and response_id in kept.exchanges and kept.exchanges[response_id].by_chat

    def answered(self, start: CallStart, end: CallEnd) -> None:
        """Note that a call was answered, and that its record is durable."""
        if end.status == "ok" and isinstance(end.response, dict):
            size = len(start.request_text or b"") + 8 * sum(len(choice.token_ids) for choice in end.choices)
            self._add(end.rollout_id, [exchange_of(start.call_id, start.request, end.response)._replace(size=size)])

    async def _read(self, rollout_id: str, previous: str, calls: Sequence[ModelCall]) -> list[Exchange]:
        """Keep the exchanges of recorded calls, and return those up to a response."""

        def sized() -> list[Exchange]:
            return [one._replace(size=len(encode(one.items))) for one in by_response(calls).values()]

        recorded = await asyncio.to_thread(sized)
        kept = self._rollouts.get(rollout_id, _Kept()).exchanges  # unredacted
        recorded = [one for one in recorded if one.response_id not in kept]
        found = exchanges_up_to({one.response_id: one for one in recorded} | kept, previous)
        self._add(rollout_id, recorded, calls)
        return found

    def _add(self, rollout_id: str, more: Iterable[Exchange], read: Sequence[ModelCall] = ()) -> None:
        kept = self._rollouts.setdefault(rollout_id, _Kept())
        self._rollouts.move_to_end(rollout_id)
        self._size -= kept.size
        for exchange in more:
            before = kept.exchanges.get(exchange.response_id)
            kept.exchanges_size += exchange.size - (before.size if before else 0)
            kept.exchanges[exchange.response_id] = exchange
        kept.parents = newest_parents(kept.parents, read)
        self._size += kept.size
        while self._size > self._memory and self._rollouts:
            self._forget(next(iter(self._rollouts)))

    def _forget(self, rollout_id: str) -> None:
        self._size -= self._rollouts.pop(rollout_id, _Kept()).size


@dataclass(slots=True)
class _Kept:
    """What is kept of a rollout: its exchanges by response, and the calls that later ones may be stored against."""

    exchanges: dict[str, Exchange] = field(default_factory=dict)
    exchanges_size: int = 0
    parents: dict[str, Parent] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.exchanges_size + sum(len(parent.tokens) for parent in self.parents.values())


def by_response(calls: Iterable[ModelCall]) -> dict[str, Exchange]:
    """Return the exchanges of the calls that were answered, by the id of their response."""
    answered = (call for call in calls if call.status == "ok" and isinstance(call.response, dict))
    return {exchange.response_id: exchange for exchange in map(_recorded, answered)}


def exchanges_up_to(known: Mapping[str, Exchange], previous: Any) -> list[Exchange]:
    """Return the exchanges up to a response, oldest first. Raise NotFound if one is unknown."""
    found: list[Exchange] = []
    while isinstance(previous, str):
        exchange = known.get(previous)
        if exchange is None or len(found) > len(known):
            raise NotFound(f"Response with id '{previous}' not found in its rollout", param="previous_response_id")
        found.append(exchange)
        previous = exchange.previous
    return found[::-1]


def items_of(exchanges: Iterable[Exchange]) -> list[Json]:
    """Return the items of all exchanges, in order."""
    return [item for exchange in exchanges for item in exchange.items]


def _recorded(call: ModelCall) -> Exchange:
    exchange = exchange_of(call.call_id, call.request, call.response)
    redacted = call.untrainable_reason == REASON
    if redacted and exchange.previous is not None:  # the mask may stand in an earlier exchange of its prompt
        redacted = MASK.encode() in encode(exchange.items)
    return exchange._replace(by_chat=bool(call.prompt_token_ids), redacted=redacted)


def exchange_of(call_id: str, request: Json, response: Json) -> Exchange:
    """Return the exchange of a recorded Responses call."""
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else dicts(given)
    items = [*items, *dicts(response.get("output"))]
    return Exchange(call_id, str(response.get("id")), items, request.get("previous_response_id"))
