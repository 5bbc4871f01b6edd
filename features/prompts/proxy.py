"""Puts versioned prompts in the place of agents' own, in requests of any of the recorded APIs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from ...core.json_text import dumps, encode
from ...core.records import CallStart, RolloutName
from ...core.redact import MASK, Redactor
from ...proxy.api.bodies import Id
from ...proxy.api.rollouts import RolloutDetail, RolloutsBody
from ...proxy.gateway.call import Question
from ...proxy.gateway.recorder import Statement
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from . import routes
from .table import CALL_PROMPT, ROLLOUT_PROMPT_KEPT, Placed, Prompt, PromptTable, Role

LOOK_S = 0.5  # between looks for the first prompt; then every call looks
Outcome = Literal["placed", "unmatched"]
Json = dict[str, Any]
Place = tuple[str | int, ...]  # the way from a request to a text in it
_ROLES = {"system": ("system", "developer"), "user": ("user",)}
# Where an API has a prompt that is no message.
_OWN = {
    ("messages", "system"): "system", ("responses", "system"): "instructions", ("responses", "user"): "input",
    ("completions", "user"): "prompt",
}  # fmt: skip
_LISTS = {"chat/completions": "messages", "messages": "messages", "responses": "input"}


class _Put(NamedTuple):
    prompt: Prompt
    version: int
    place: Place
    sent: str


class PromptRewriter:
    """All prompts. As long as there is none, a call costs nothing more.

    `count` is called for each call, while there are prompts, with whether one was put into it.
    """

    def __init__(self, table: PromptTable, redactor: Redactor, count: Callable[[Outcome], None]) -> None:
        self._table, self._redactor, self._count = table, redactor, count
        self._stamp: Any = None
        self._looked = -LOOK_S
        self._prompts: list[Prompt] = []

    async def put(self, question: Question, rollout: RolloutName) -> Question:
        """Return the question with prompts put in, as the record has it. The agent's own texts are kept beside it.

        A prompt is its agent's message of a role, or, where the agent has no name, the message with a text that one of
        the prompt's versions has. A rollout keeps the version that it began with. What fits no prompt goes unchanged.
        """
        await self._refresh()
        if not self._prompts:
            return question
        placed: list[_Put] = []
        body = original = question.body
        for prompt in self._prompts:
            place = find(question.endpoint, original, prompt.role)
            if place is None or any(place == other.place for other in placed):
                continue
            sent = text_at(original, place)
            is_named = prompt.agent is not None and rollout.agent is not None
            if prompt.agent != rollout.agent if is_named else prompt.version_of(sent) is None:
                continue
            version = await self._table.kept_by(rollout.rollout_id, prompt.name)
            if version is None and await self._table.has_begun(rollout.rollout_id, rollout.agent):
                continue  # it began with the agent's own text, before there was this prompt
            placed.append(_Put(prompt, version or prompt.live, place, sent))
            body = put(body, place, prompt.text_of(placed[-1].version))
        self._count("placed" if placed else "unmatched")
        if not placed:
            return question
        if any(text_at(body, one.place) != one.sent for one in placed):
            question = question._replace(body=body, request=question.request.with_body(encode(body)))
        return question._replace(also=partial(self._statements, placed, original))

    async def _refresh(self) -> None:
        if not self._prompts and time.monotonic() < self._looked + LOOK_S:
            return
        self._looked = time.monotonic()
        if (stamp := await self._table.stamp()) != self._stamp:
            self._prompts, self._stamp = await self._table.all(), stamp

    def _statements(self, placed: Sequence[_Put], original: Json, start: CallStart) -> list[Statement]:
        statements, kept = list[Statement](), self._redactor.value(original, "request")
        for one in placed:
            row: Json = {"rollout_id": start.rollout.rollout_id, "call_id": start.call_id, "name": one.prompt.name}
            row |= {"version": one.version, "place": dumps(one.place)}
            row["sent_version"], row["sent"] = one.prompt.version_of(one.sent), None
            if row["sent_version"] is None:
                try:
                    row["sent"] = text_at(kept, one.place)
                except (TypeError, LookupError):  # it is redacted
                    row["sent"] = MASK
            statements += [(ROLLOUT_PROMPT_KEPT, row), (CALL_PROMPT, row)]
        return statements


def find(endpoint: str, request: Json, role: Role) -> Place | None:
    """Return the place of the first message of a role; None if there is none, or it is not one text alone.

    A request that continues a conversation kept by the server lacks the user's first message.
    """
    if role == "user" and (request.get("previous_response_id") or request.get("conversation")):
        return None
    own, name = _OWN.get((endpoint, role), ""), _LISTS.get(endpoint, "")
    if request.get(own) and (place := _text(request[own], (own,))):
        return place
    messages = request.get(name)
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") in _ROLES[role]:
            return _text(message.get("content"), (name, i, "content"))
    return None


def _text(content: Any, place: Place) -> Place | None:
    """The place of the one text in a content."""
    match content:
        case str():
            return place
        case [{"type": "text" | "input_text", "text": str()}]:
            return (*place, 0, "text")
    return None


def text_at(request: Json, place: Place) -> str:
    """Return the text at a place that `find` returned."""
    value: Any = request
    for step in place:
        value = value[step]
    if not isinstance(value, str):
        raise TypeError(f"no text at {place}")
    return value


def put(value: Any, place: Place, text: str) -> Any:
    """Return the request with another text there. What is on the way to it is copied, the rest is shared."""
    if not place:
        return text
    copied = value.copy()
    copied[place[0]] = put(value[place[0]], place[1:], text)
    return copied


class OpenedWithPrompts(BaseModel):
    """`prompts`: versions of prompts by name, if not the live ones."""

    prompts: Annotated[
        dict[Id, routes.Version],
        Field(json_schema_extra={"additionalProperties": False}),  # beside the pattern of its names
    ] = {}


class RolloutPrompts(BaseModel):
    """`prompts`: what the model was shown in place of texts that the agent sent."""

    prompts: list[Placed]


class PromptsPlugin(ProxyPlugin):
    """Rewrites requests where there are prompts."""

    routers = (routes.router, routes.agents, routes.admins)
    fields = ((RolloutsBody, OpenedWithPrompts), (RolloutDetail, RolloutPrompts))

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        counter = core.metrics.counter("prompts", "Calls that a prompt was put into, and that fitted none", "outcome")
        count = lambda outcome: counter.labels(outcome).inc()  # noqa: E731
        yield Hooks(rewrite=PromptRewriter(PromptTable(core.store.database), core.redactor, count).put)

    async def check_rollouts(self, store: Store, added: OpenedWithPrompts) -> None:
        for name, version in added.prompts.items():
            await PromptTable(store.database).get(name, version)

    async def rollouts_opened(self, store: Store, rollout_ids: Sequence[str], added: OpenedWithPrompts) -> None:
        await PromptTable(store.database).pin(rollout_ids, added.prompts)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        return {"prompts": await PromptTable(store.database).placed_in(rollout_id)}


plugin = PromptsPlugin
