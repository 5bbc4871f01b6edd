"""Finds the rollout of a request that names none: the rollout with the conversation that the request continues.

The index is written in the same commit as the call's record, so it survives restarts and all workers share it. Calls
that name their rollout are not indexed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ...core.http import in_thread_if_large
from ...core.records import CallEnd, CallStart, ModelCall, RolloutName
from ...core.values import is_under_way
from ...store.calls import Giver
from ...store.conversations import (
    CONVERSATION_ORIGIN,
    CONVERSATION_POINT,
    CONVERSATION_TAKEN,
    CONVERSATION_TIP,
    TRIED_S,
)
from ...store.store import Store
from ..dialects.atoms import (
    Atom,
    State,
    answer_atoms,
    answer_marks,
    beginnings,
    digest,
    origins,
    quotations,
    request_atoms,
    request_marks,
    without_thoughts,
)
from .recorder import Statement

log = logging.getLogger(__name__)

Json = dict[str, Any]

# How much is looked for in one request: the newest marks, its longest beginnings, then quotations.
MARKS, BEGINNINGS, QUOTATIONS = 4, 500, 500
_APART = "\0"  # between texts that are searched as one
_FORCED = ("required", "any")  # what `tool_choice` is where the model has to call a function


class Conversation:
    """A request that names no rollout: its atoms, and the state after each of them.

    `size`: the request's size in bytes; a large request is handled in a thread. `within`: its key, task and mode, in
    which conversations with the same messages may differ.
    """

    def __init__(self, caller: str, name: RolloutName, request: Json, size: int = 0) -> None:
        self.caller, self.request, self.size = caller, request, size
        self.within = f"{caller}\n{name.task_id or ''}\n{name.mode}"
        self.atoms = request_atoms(request)
        self.begun = beginnings(self.atoms)
        self._system = digest("", *(atom.what for atom in self.atoms if atom.who == "system"))

    def points(self, state: State) -> tuple[bytes, bytes]:
        """Return two digests of a state: with system prompts and tool results, and without."""
        return digest(self.within, self._system, state.exact), digest(self.within, state.loose)

    def asked(self) -> bytes:
        """Return the digest of the request, including ids: the requests of two agents may differ only in ids."""
        ids = (atom.who for atom in self.atoms if atom.kind != "text")
        return digest(self.within, "asked", self._system, self.begun[-1].exact if self.begun else b"", *ids)

    def ends(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the digests of each beginning of the request that seems to end in an answer, the longest first.

        An answer may have been empty; then two user messages follow each other.
        """
        after = None
        for atom, state in zip(reversed(self.atoms), reversed(self.begun), strict=True):
            was_left_empty = after is not None and (after.kind, after.who) == ("text", "user") and atom.who != "system"
            if atom.who == "assistant" or atom.kind == "call" or was_left_empty:
                yield self.points(state)
            after = atom

    def extended_by(self, answer: list[Atom]) -> Iterator[State]:
        """Yield the state of the request with an answer added, for each way in which clients may send it back.

        Many clients leave out the thoughts at the beginning of an answer's text. A forced tool call is a structured
        answer, which may come back as text.
        """
        yield self._then(answer)
        if answer and answer[0].who == "assistant" and (plain := without_thoughts(answer[0].what)) != answer[0].what:
            yield self._then([*([answer[0]._replace(what=plain)] if plain else []), *answer[1:]])
        choice = self.request.get("tool_choice")
        is_free = choice.get("type") in ("auto", "none") if isinstance(choice, dict) else choice not in _FORCED
        if not is_free and len(answer) == 1 and answer[0].kind == "call":
            yield self._then([Atom("text", "assistant", answer[0].what)])

    def _then(self, answer: list[Atom]) -> State:
        begun = len(self.atoms)  # where the answer's text begins: the request may end in a part of it
        while begun and (self.atoms[begun - 1].kind, self.atoms[begun - 1].who) == ("text", "assistant"):
            begun -= 1
        before = self.begun[begun - 1] if begun else State()
        return [before, *beginnings([*self.atoms[begun:], *answer], before)][-1]


class UnnamedRollouts:
    """Finds the rollout of a request that does not name one."""

    def __init__(self, store: Store) -> None:
        self._index = store.conversations
        self._calls = store.calls

    async def find(self, conversation: Conversation, *, is_retry: bool = False) -> str | None:
        """Return the rollout that a request continues or retries; None if there is none.

        It looks, in this order, for the same request, if it failed lately or the client says that it retries; the id of
        a response or conversation that the server keeps; ids that only one answer has; the longest beginning that was
        answered; text of an answer, in an edited or summarised history or in a sub-agent's instructions. Example, calls
        with one key:

            r1   user: go                                         answer: call f(1), id X
            r2   user: go                                         answer: call f(2), id X
                 user: go · call f(2), id Z · result 5            continues r2: no other rollout answered "go" with f(2)
                 user: He said "The tower was built in 1881."     continues the rollout with this text in an answer

        A call found by its messages is taken: the next request like this one continues another such call, if any. A
        retry's call is kept until the retry's start is recorded, so that a further retry would still find it. Raises
        StoreUnavailable.
        """
        index, within, request = self._index, conversation.within, conversation.request
        if is_retry or conversation.atoms:
            asked = conversation.asked()
            since = None if is_retry else time.time() - TRIED_S
            if again := await index.take(asked, since=since, keep=is_retry):
                return again
        for kept in _kept_by_server(request.get("previous_response_id"), request):
            if rollout := await index.leads_to(digest(conversation.caller, "response", kept)):
                return rollout
        for mark in islice(request_marks(request), MARKS):
            if rollout := await index.leads_to(digest(within, "id", mark)):
                for _, loose in islice(conversation.ends(), 1):
                    await index.take(loose, rollout_id=rollout)
                return rollout
        for point in islice(conversation.ends(), BEGINNINGS):
            if rollout := await index.rollout_at(*point):
                return rollout
        by_users = dict[str, None]()  # a user may quote several, such as a summary and the rollout that it summarises
        for is_answer, quotation in await in_thread_if_large(
            conversation.size, lambda: [*islice(quotations(within, conversation.atoms), QUOTATIONS)]
        ):
            if rollout := await index.leads_to(quotation):
                if is_answer:
                    return rollout
                by_users[rollout] = None
        return await index.longest([*by_users])

    async def giver(self, caller: str, rollout: RolloutName, response_id: str) -> Giver | None:
        """Return the call that gave a response, or None if the response is unknown."""
        response_digest = digest(caller, "response", response_id)
        rollout_id = rollout.rollout_id if rollout.named else await self._index.leads_to(response_digest)
        return None if rollout_id is None else await self._calls.giver(rollout_id, response_id)

    async def call(self, call_id: str) -> ModelCall:
        """Return a call whose id `giver` returned."""
        (call,) = await self._calls.some([call_id], {})
        return call

    async def compacted(self, caller: str, request: Json, name: RolloutName, response: Json) -> None:
        """Remember that the items of a compacted conversation lead to its rollout."""
        conversation = await asyncio.to_thread(Conversation, caller, name, request)
        if (rollout_id := await self.find(conversation)) is not None:
            digests = {digest(conversation.within, "id", mark) for mark in answer_marks(response)}
            digests |= {digest(caller, "response", kept) for kept in _kept_by_server(response.get("id"), {})}
            await self._index.add([{"rollout_id": rollout_id, "at": time.time(), "digest": one} for one in digests])


def start_statements(start: CallStart, conversation: Conversation) -> list[Statement]:
    """Return the statements that let the same request, if sent again, find this call."""
    row = {"call_id": start.call_id, "rollout_id": start.rollout.rollout_id, "digest": conversation.asked()}
    tip = CONVERSATION_TIP, row | {"at": start.started_at, "exact": None}
    return [tip, (CONVERSATION_TAKEN, row)] if start.is_retry else [tip]


def end_statements(start: CallStart, conversation: Conversation, end: CallEnd) -> list[Statement]:
    """Return statements that let requests find the answered call that they continue.

    There are none for a failed call, except for the id of a response that is still under way.
    """
    try:
        return list(_end_statements(start, conversation, end)) if isinstance(end.response, dict) else []
    except Exception:  # the call is recorded whatever its answer looks like
        log.exception("call %s: later requests cannot find its conversation", end.call_id)
        return []


def _end_statements(start: CallStart, conversation: Conversation, end: CallEnd) -> Iterator[Statement]:
    response, at = end.response, start.started_at + end.latency_ms / 1000
    row = {"call_id": start.call_id, "rollout_id": start.rollout.rollout_id, "at": at}
    if end.status == "ok":
        request_text, marks = _APART.join(atom.what for atom in conversation.atoms), set(answer_marks(response))
        for answer in answer_atoms(response):
            for state in conversation.extended_by(answer):
                exact, loose = conversation.points(state)
                yield CONVERSATION_TIP, row | {"digest": loose, "exact": exact}
                for point in (exact, loose) if state.exact != state.loose else (loose,):
                    yield CONVERSATION_POINT, row | {"digest": point}
            for origin in origins(conversation.within, request_text, answer, marks):
                yield CONVERSATION_ORIGIN, row | {"digest": origin}
    if end.status == "ok" or is_under_way(response):
        for kept in _kept_by_server(response.get("id"), response):
            yield CONVERSATION_POINT, row | {"digest": digest(conversation.caller, "response", kept)}


def _kept_by_server(response_id: Any, body: Json) -> Iterator[str]:
    """Yield the ids of what the server stores: a response, and the conversation of a request or an answer."""
    conversation = body.get("conversation")
    kept = conversation.get("id") if isinstance(conversation, dict) else conversation
    return (name for name in (response_id, kept) if isinstance(name, str))
