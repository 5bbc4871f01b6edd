"""Finds what was said up to a response of /v1/responses, where a request only refers to it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..apis.tools import dicts
from ..errors import NotFound
from ..json_text import encode
from ..recording.redact import MASK, REASON
from ..store.store import Store
from ..types import CallEnd, CallStart, ModelCall

Json = dict[str, Any]


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
        self._rollouts: OrderedDict[str, dict[str, Said]] = OrderedDict()
        self._memory = memory
        self._kept = 0

    async def up_to(self, rollout_id: str, previous: str) -> list[Said]:
        """Return what was said up to a response, oldest first. Raise NotFound if it is unknown."""
        try:
            found = conversation(self._rollouts.get(rollout_id, {}), previous)
            if await self._calls.is_kept(found[-1].call_id):
                return found
            self._forget(rollout_id)  # it was deleted, perhaps by another process
        except NotFound:
            pass
        remembered = dict(self._rollouts.get(rollout_id, {}))  # as it was said
        found = await asyncio.to_thread(_found, await self._recorded(rollout_id), remembered, previous)
        for said in found:
            self._add(rollout_id, said)
        return found

    def has_lately(self, rollout_id: str, response_id: Any) -> bool:
        """Return whether a response is in memory, and went through the chat route."""
        said = self._rollouts.get(rollout_id, {}).get(response_id) if isinstance(response_id, str) else None
        return said is not None and said.by_chat

    def answered(self, start: CallStart, end: CallEnd) -> None:
        """Note that a call was answered, and that its record is durable."""
        if end.status == "ok" and isinstance(end.response, dict):
            size = len(start.request_text or b"") + 8 * sum(len(choice.token_ids) for choice in end.choices)
            self._add(end.rollout_id, said_in(start.call_id, start.request, end.response)._replace(size=size))

    async def _recorded(self, rollout_id: str) -> list[ModelCall]:
        try:
            return await self._calls.of(rollout_id)
        except NotFound:
            return []

    def _add(self, rollout_id: str, said: Said) -> None:
        rollout = self._rollouts.setdefault(rollout_id, {})
        self._rollouts.move_to_end(rollout_id)
        if (before := rollout.pop(said.response_id, None)) is not None:
            self._kept -= before.size
        rollout[said.response_id] = said
        self._kept += said.size
        while self._kept > self._memory and self._rollouts:
            self._forget(next(iter(self._rollouts)))

    def _forget(self, rollout_id: str) -> None:
        self._kept -= sum(said.size for said in self._rollouts.pop(rollout_id, {}).values())


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


def _found(calls: Sequence[ModelCall], remembered: Mapping[str, Said], previous: str) -> list[Said]:
    found = conversation({**by_response(calls), **remembered}, previous)
    return [said if said.size else said._replace(size=len(encode(said.items))) for said in found]


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
