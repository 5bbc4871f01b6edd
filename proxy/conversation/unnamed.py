"""The conversations of rollouts that nobody names, in the store: known after a restart, and to every worker.

They are written with the call's own record, in the same commit, and cost nothing where a rollout is named.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..gateway.ports import Recorder, Statement
from ..store.conversations import CONVERSATION_ORIGIN, CONVERSATION_POINT, CONVERSATION_TIP
from ..store.store import Store
from ..types import CallEnd, CallStart, RolloutName
from .continuation import QUOTATIONS, Atom, _bytes, _chain, _digest, _new_origins, _quotes, answers, request_atoms

log = logging.getLogger(__name__)

Json = dict[str, Any]


class Conversations:
    """Which rollout each conversation of the past belongs to."""

    def __init__(self, store: Store) -> None:
        self._index = store.conversations
        self._calls = store.calls

    async def find(self, scope: str, request: Json, name: RolloutName, *, is_retry: bool = False) -> str | None:
        """The rollout that a request goes on with, or, for a client's retry, that it was sent in before.

        What it goes on with is taken: the next request like it goes on with another. Raises StoreUnavailable.
        """
        atoms, said = request_atoms(request), _said_in(scope, name)
        if is_retry and (again := await self._index.take(_asked(said, atoms))):
            return again
        for previous in (request.get("previous_response_id"), _kept(request)):
            if isinstance(previous, str):
                said_by = _digest(scope, b"response", _bytes(previous))
                if origin := self._index.leads_to(said_by):
                    return origin
        return await self._extended(said, atoms) or self._quoted(said, atoms)

    async def _extended(self, scope: str, atoms: list[Atom]) -> str | None:
        """By the longest beginning that was an answered conversation; rather one that nothing has gone on with yet."""
        chain = _chain(atoms)
        for i in range(len(atoms) - 1, 0, -1):
            if atoms[i - 1].who != "assistant" and atoms[i - 1].kind != "call":
                continue
            state = _digest(scope, chain[i - 1])
            if found := await self._index.take(state) or self._index.leads_to(state):
                return found
        return None

    def _quoted(self, scope: str, atoms: list[Atom]) -> str | None:
        """By what an edited or summarised history still holds of one rollout only, the oldest first."""
        return next(filter(None, map(self._index.leads_to, islice(_quotes(scope, atoms), QUOTATIONS))), None)

    async def giver(self, scope: str, rollout: RolloutName, response_id: str) -> tuple[str, str | None] | None:
        """The rollout in which a response was given, and the upstream that gave it; None for one that is not known."""
        said_by = _digest(scope, b"response", _bytes(response_id))
        rollout_id = rollout.rollout_id if rollout.named else self._index.leads_to(said_by)
        return None if rollout_id is None else await self._calls.giver(rollout_id, response_id)


class Remembering:
    """A recorder of one call of an unnamed rollout, which remembers its conversation as well."""

    def __init__(self, recorder: Recorder, scope: str, start: CallStart) -> None:
        self._recorder = recorder
        self._scope = scope
        self._start = start

    async def start(self, start: CallStart, also: Sequence[Statement] = ()) -> None:
        await self._recorder.start(start, [*also, *asked(self._scope, start)])

    def end(self, end: CallEnd, also: Sequence[Statement] = ()) -> Awaitable[None]:
        try:
            answer = list(answered(self._scope, self._start, end))
        except Exception:  # whatever the upstream may have answered, it is recorded
            log.exception("call %s: its conversation is not remembered", end.call_id)
            answer = list[Statement]()
        return self._recorder.end(end, [*also, *answer])


def asked(scope: str, start: CallStart) -> list[Statement]:
    """What to remember of a call that begins."""
    row = {"call_id": start.call_id, "rollout_id": start.rollout.rollout_id, "at": start.started_at}
    said = _said_in(scope, start.rollout)
    return [(CONVERSATION_TIP, row | {"digest": _asked(said, request_atoms(start.request))})]


def answered(scope: str, start: CallStart, end: CallEnd) -> Iterator[Statement]:
    """What to remember of a call that was answered; nothing of one that failed."""
    if end.status != "ok" or not isinstance(end.response, dict):
        return
    at = start.started_at + end.latency_ms / 1000
    row = {"call_id": start.call_id, "rollout_id": start.rollout.rollout_id, "at": at}
    atoms, said = request_atoms(start.request), _said_in(scope, start.rollout)
    for answer in answers(end.response):
        state = {"digest": _digest(said, *_chain([*atoms, *answer])[-1:])}
        yield CONVERSATION_TIP, row | state
        yield CONVERSATION_POINT, row | state
        for origin in _new_origins(said, atoms, answer):
            yield CONVERSATION_ORIGIN, row | {"digest": origin}
    for name in (end.response.get("id"), _kept(end.response)):
        if isinstance(name, str):
            yield CONVERSATION_POINT, row | {"digest": _digest(scope, b"response", _bytes(name))}


def _said_in(scope: str, name: RolloutName) -> str:
    """Where a conversation was: in tasks that are named, and in evaluations, the same may be said."""
    return f"{scope}\n{name.task_id or ''}\n{name.mode}"


def _kept(body: Json) -> Any:
    """The id of a conversation that the server keeps for Responses: of a request or an answer."""
    found = body.get("conversation")
    return found.get("id") if isinstance(found, dict) else found


def _asked(scope: str, atoms: list[Atom]) -> bytes:
    return _digest(scope, b"asked", *_chain(atoms)[-1:])
