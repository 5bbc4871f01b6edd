"""Finds the rollout of an unnamed request: the one whose conversation it continues. Contract, section 1.

What is needed to find it is written with the call's own record, in the same commit: it is known after a restart, and to
every worker. Named rollouts cost nothing here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from ..apis.atoms import Atom, answer_atoms, request_atoms
from ..apis.marks import answer_marks, is_unique, request_marks
from ..recording.group_commit import Statement
from ..store.conversations import CONVERSATION_ORIGIN, CONVERSATION_POINT, CONVERSATION_TIP
from ..store.store import Store
from ..types import CallEnd, CallStart, RolloutName
from .digests import State, beginnings, digest, identified, last_question, origins, quotations, without_thoughts

log = logging.getLogger(__name__)

Json = dict[str, Any]

# How much is looked for in one request: the longest of its beginnings, then, if nothing goes on with them, quotations.
BEGINNINGS, QUOTATIONS = 500, 500
# How many marks are read, and how many of them, the newest, are looked for before anything else.
MARKS, NEWEST_MARKS = 100, 4
_APART = "\0"  # between texts that are searched as one


class Conversation:
    """What a request says: its atoms, and a state for each beginning of them. Of a long request, read it `aside`."""

    def __init__(self, request: Json) -> None:
        self.atoms = request_atoms(request)
        self.begun = beginnings(self.atoms)

    @property
    def whole(self) -> State:
        """Return the state of all of it."""
        return self.begun[-1] if self.begun else State()

    def ends(self) -> Iterator[State]:
        """Yield the states in which it was answered, as far as it tells, the longest first.

        An answer may have been empty: then what the client says next comes right after what it asked.
        """
        for i in range(len(self.atoms) - 1, -1, -1):
            atom, after = self.atoms[i], self.atoms[i + 1] if i + 1 < len(self.atoms) else None
            was_left_empty = after is not None and (after.kind, after.who) == ("text", "user") and atom.who != "system"
            if atom.who == "assistant" or atom.kind == "call" or was_left_empty:
                yield self.begun[i]

    def gone_on_with(self, answer: list[Atom], *, is_forced: bool = False) -> Iterator[State]:
        """Yield the state of all of it and an answer.

        A call that the request forced is a structured answer: it may come back as a text, which is a second state.
        Another one is the answer without the thoughts that its text begins with, which many clients leave out.
        """
        yield self._then(answer)
        if answer and answer[0].who == "assistant" and (said := without_thoughts(answer[0].what)) != answer[0].what:
            yield self._then([*([answer[0]._replace(what=said)] if said else []), *answer[1:]])
        if is_forced and len(answer) == 1 and answer[0].kind == "call":
            yield self._then([Atom("text", "assistant", answer[0].what)])

    def _then(self, answer: list[Atom]) -> State:
        begun = len(self.atoms)  # where the answer's text begins: the request may end in a part of it
        while begun and (self.atoms[begun - 1].kind, self.atoms[begun - 1].who) == ("text", "assistant"):
            begun -= 1
        states = beginnings([*self.atoms[begun:], *answer], self.begun[begun - 1] if begun else State())
        return states[-1] if states else self.whole


class UnnamedRollouts:
    """Finds the rollout of a request that does not name one."""

    def __init__(self, store: Store) -> None:
        self._index = store.conversations
        self._calls = store.calls

    async def find(
        self, caller: str, request: Json, said: Conversation, name: RolloutName, *, is_retry: bool = False
    ) -> str | None:
        """Return the rollout that a request, which says `said`, continues, or the one of a client's retry.

        What it goes on with is taken: the next request like it goes on with another. Raises StoreUnavailable.
        """
        within = _within(caller, name)
        if again := await self._tried(_asked(within, said), said, is_retry):
            return again
        for previous in (request.get("previous_response_id"), _kept(request)):
            if not isinstance(previous, str):
                continue
            if rollout := await self._index.leads_to(digest(caller, "response", previous)):
                return rollout
        marks = [*dict.fromkeys(islice(request_marks(request), MARKS))]
        return (
            await self._marked(within, said, marks)
            or await self._extended(within, said)
            or await self._quoted(within, said.atoms, marks)
        )

    async def _tried(self, asked: bytes, said: Conversation, is_retry: bool) -> str | None:
        """Where this very request was sent before: it failed, or the client says that it sends it again."""
        if is_retry:
            return await self._index.take(asked)
        return await self._index.take_failed(asked) if said.atoms else None

    async def _marked(self, within: str, said: Conversation, marks: list[str]) -> str | None:
        """By the newest of what only one answer has, of whatever is written around it."""
        for mark in islice(filter(is_unique, marks), NEWEST_MARKS):
            if rollout := await self._index.leads_to(identified(within, mark)):
                for end in islice(said.ends(), 1):
                    await self._index.take_of(digest(within, end.loose), rollout)
                return rollout
        return None

    async def _extended(self, within: str, said: Conversation) -> str | None:
        """By the longest beginning that was an answered conversation; rather one that nothing has gone on with yet."""
        for end in islice(said.ends(), BEGINNINGS):
            if rollout := await self._index.goes_on_from(digest(within, end.exact), digest(within, end.loose)):
                return rollout
        return None

    async def _quoted(self, within: str, atoms: list[Atom], marks: list[str]) -> str | None:
        """By what an edited or summarised history still holds of one rollout only, the oldest first."""
        marked = (identified(within, mark) for mark in marks)
        for quotation in islice(chain(quotations(within, atoms), marked), QUOTATIONS):
            if rollout := await self._index.leads_to(quotation):
                return rollout
        return None

    async def giver(self, caller: str, rollout: RolloutName, response_id: str) -> tuple[str, str | None] | None:
        """Return the rollout and the upstream that gave a response, or None if the response is unknown."""
        said_by = digest(caller, "response", response_id)
        rollout_id = rollout.rollout_id if rollout.named else await self._index.leads_to(said_by)
        return None if rollout_id is None else await self._calls.giver(rollout_id, response_id)


def asked(caller: str, start: CallStart, said: Conversation) -> list[Statement]:
    """Return the entries to remember of a call that begins and says `said`."""
    row = {"call_id": start.call_id, "rollout_id": start.rollout.rollout_id, "at": start.started_at}
    within = _within(caller, start.rollout)
    return [(CONVERSATION_TIP, row | {"digest": _asked(within, said), "exact": None})]


def answered(caller: str, start: CallStart, said: Conversation, end: CallEnd) -> list[Statement]:
    """Return the entries to remember of an answered call; none of a failed call."""
    if end.status != "ok" or not isinstance(end.response, dict):
        return []
    try:
        return list(_answered(caller, start, said, end, end.response))
    except Exception:  # whatever the upstream may have answered, it is recorded
        log.exception("call %s: its conversation is not remembered", end.call_id)
        return []


def _answered(caller: str, start: CallStart, said: Conversation, end: CallEnd, response: Json) -> Iterator[Statement]:
    at = start.started_at + end.latency_ms / 1000
    row = {"call_id": start.call_id, "rollout_id": start.rollout.rollout_id, "at": at}
    within, told = _within(caller, start.rollout), _APART.join(atom.what for atom in said.atoms)
    marks = set(answer_marks(response))
    question, is_forced = last_question(said.atoms), _forces_a_call(start.request)
    for answer in answer_atoms(response):
        for whole in said.gone_on_with(answer, is_forced=is_forced):
            exact, loose = digest(within, whole.exact), digest(within, whole.loose)
            yield CONVERSATION_TIP, row | {"digest": loose, "exact": exact}
            for point in {exact, loose}:
                yield CONVERSATION_POINT, row | {"digest": point}
        for origin in origins(within, told, answer, question, marks):
            yield CONVERSATION_ORIGIN, row | {"digest": origin}
    for name in (response.get("id"), _kept(response)):
        if isinstance(name, str):
            yield CONVERSATION_POINT, row | {"digest": digest(caller, "response", name)}


def _forces_a_call(request: Json) -> bool:
    """Whether the model has to call a function, as clients ask that want an answer of some shape."""
    choice = request.get("tool_choice")
    return choice in ("required", "any") or (isinstance(choice, dict) and choice.get("type") not in ("auto", "none"))


def _within(caller: str, name: RolloutName) -> str:
    """Whose conversation it is, and of what: in other tasks, and in evaluations, the same may be said."""
    return f"{caller}\n{name.task_id or ''}\n{name.mode}"


def _kept(body: Json) -> Any:
    """The id of a conversation that the server keeps for Responses: of a request or an answer."""
    conversation = body.get("conversation")
    return conversation.get("id") if isinstance(conversation, dict) else conversation


def _asked(within: str, said: Conversation) -> bytes:
    """The digest of a request, ids included: what two agents ask may differ in them alone."""
    ids = (atom.who for atom in said.atoms if atom.kind != "text")
    return digest(within, "asked", said.whole.exact, *ids)
