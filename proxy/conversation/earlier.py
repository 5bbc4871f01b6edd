"""Finds what was said up to a response of /v1/responses, where a request only refers to it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..apis.tools import dicts
from ..errors import NotFound
from ..json_text import encode
from ..recording.redact import MASK, REASON
from ..store.calls import newest_parents
from ..store.requests.parents import Parent
from ..store.store import Store
from ..types import CallEnd, CallStart, ModelCall

Json = dict[str, Any]
LATELY = 64  # calls of a rollout that are looked at for answers of other workers


class Said(NamedTuple):
    """What a call added to its conversation: what was asked and answered after the response `previous`.

    `by_chat`: it went through the chat route, so that the server does not know the response. `redacted`: its record
    lacks something that the model was shown, or said. `size`: bytes, about; 0 if not known yet.
    """

    call_id: str
    response_id: str
    items: list[Json]
    previous: Any
    by_chat: bool = True
    redacted: bool = False
    size: int = 0


class Earlier:
    """Keeps in memory what was said in the rollouts that were asked last, as it was said. The store has all others."""

    def __init__(self, store: Store, *, memory: int = 2**25) -> None:
        """About `memory` bytes are kept."""
        self._calls = store.calls
        self._rollouts: OrderedDict[str, _Kept] = OrderedDict()
        self._memory = memory
        self._size = 0

    async def up_to(self, rollout_id: str, previous: str) -> list[Said]:
        """Return what was said up to a response, oldest first. Raise NotFound if it is unknown."""
        try:
            found = conversation(self._of(rollout_id), previous)
            if await self._calls.is_kept(found[-1].call_id):
                return found
            self._forget(rollout_id)  # it was deleted, perhaps by another process
        except NotFound:
            pass
        if (kept := self._rollouts.get(rollout_id)) is not None:
            seen = {said.call_id for said in kept.said.values()}
            others = await self._calls.answered(rollout_id, LATELY) - seen
            with suppress(NotFound):
                return await self._read(rollout_id, previous, await self._calls.some(others, kept.parents))
        return await self._read(rollout_id, previous, await self._recorded(rollout_id))

    def has_lately(self, rollout_id: str, response_id: Any) -> bool:
        """Return whether a response is in memory, and went through the chat route."""
        said = self._of(rollout_id).get(response_id) if isinstance(response_id, str) else None
        return said is not None and said.by_chat

    def answered(self, start: CallStart, end: CallEnd) -> None:
        """Note that a call was answered, and that its record is durable."""
        if end.status == "ok" and isinstance(end.response, dict):
            size = len(start.request_text or b"") + 8 * sum(len(choice.token_ids) for choice in end.choices)
            self._add(end.rollout_id, [said_in(start.call_id, start.request, end.response)._replace(size=size)])

    async def _recorded(self, rollout_id: str) -> list[ModelCall]:
        try:
            return await self._calls.of(rollout_id)
        except NotFound:
            return []

    async def _read(self, rollout_id: str, previous: str, calls: Sequence[ModelCall]) -> list[Said]:
        """Keep what recorded calls say, and return what was said up to a response."""
        recorded = await asyncio.to_thread(_sized, calls)
        remembered = self._of(rollout_id)  # as it was said
        found = conversation({**recorded, **remembered}, previous)
        self._add(rollout_id, [said for said in recorded.values() if said.response_id not in remembered], calls)
        return found

    def _of(self, rollout_id: str) -> Mapping[str, Said]:
        kept = self._rollouts.get(rollout_id)
        return {} if kept is None else kept.said

    def _add(self, rollout_id: str, more: Iterable[Said], read: Sequence[ModelCall] = ()) -> None:
        kept = self._rollouts.setdefault(rollout_id, _Kept())
        self._rollouts.move_to_end(rollout_id)
        before = kept.size
        for said in more:
            kept.add(said)
        kept.parents = newest_parents(kept.parents, read)
        self._size += kept.size - before
        while self._size > self._memory and self._rollouts:
            self._forget(next(iter(self._rollouts)))

    def _forget(self, rollout_id: str) -> None:
        self._size -= self._rollouts.pop(rollout_id).size


@dataclass(slots=True)
class _Kept:
    """What is kept of a rollout: what was said, by response, and what later calls may be stored against."""

    said: dict[str, Said] = field(default_factory=dict)
    said_size: int = 0
    parents: dict[str, Parent] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.said_size + sum(len(parent.tokens) for parent in self.parents.values())

    def add(self, said: Said) -> None:
        if (before := self.said.get(said.response_id)) is not None:
            self.said_size -= before.size
        self.said[said.response_id] = said
        self.said_size += said.size


def by_response(calls: Iterable[ModelCall]) -> dict[str, Said]:
    """Return what recorded calls say, by the id of their response; only of those that were answered."""
    answered = (call for call in calls if call.status == "ok" and isinstance(call.response, dict))
    return {said.response_id: said for said in map(_recorded, answered)}


def conversation(known: Mapping[str, Said], previous: Any) -> list[Said]:
    """Return what was said up to a response, oldest first. Raise NotFound if some of it is unknown."""
    found: list[Said] = []
    while isinstance(previous, str):
        said = known.get(previous)
        if said is None or len(found) > len(known):
            raise NotFound(f"Response with id '{previous}' not found in its rollout", param="previous_response_id")
        found.append(said)
        previous = said.previous
    return found[::-1]


def items_of(earlier: Iterable[Said]) -> list[Json]:
    """Return all that was asked and answered."""
    return [item for said in earlier for item in said.items]


def _sized(calls: Iterable[ModelCall]) -> dict[str, Said]:
    said = by_response(calls)
    return {response_id: one._replace(size=len(encode(one.items))) for response_id, one in said.items()}


def _recorded(call: ModelCall) -> Said:
    said = said_in(call.call_id, call.request, call.response)
    redacted = call.untrainable_reason == REASON
    if redacted and said.previous is not None:  # whatever is said in it: its prompt might tell what was removed before
        redacted = MASK.encode() in encode(said.items)
    return said._replace(by_chat=bool(call.prompt_token_ids), redacted=redacted)


def said_in(call_id: str, request: Json, response: Json) -> Said:
    """Return what a recorded Responses call says."""
    asked = request.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else dicts(asked)
    items = [*items, *dicts(response.get("output"))]
    return Said(call_id, str(response.get("id")), items, request.get("previous_response_id"))
