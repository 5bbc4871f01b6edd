"""Puts versioned prompts in the place of agents' own, in requests of any of the recorded APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from ...core.errors import StoreUnavailable
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

LOOK_S = 0.5  # until the first prompt is seen; then every call looks
Outcome = Literal["placed", "unmatched"]
Json = dict[str, Any]
Place = tuple[str | int, ...]  # the way from a request to a text in it
_ROLES = {"system": ("system", "developer"), "user": ("user",)}
# Where an API has a prompt that is no message.
_OWN = {("messages", "system"): "system", ("responses", "system"): "instructions"}
_LISTS = {"chat/completions": "messages", "messages": "messages", "responses": "input"}
_TEXTS = ("text", "input_text")


class _Place(NamedTuple):
    name: str
    version: int
    place: Place
    sent: str


class PromptRewriter:
    """All prompts. Use it with `async with`. As long as there is none, a call costs nothing more."""

    def __init__(self, table: PromptTable, redactor: Redactor, count: Callable[[Outcome], None]) -> None:
        """`count` is called for each call, while there are prompts, with whether one was put into it."""
        self._table = table
        self._redactor = redactor
        self._count = count
        self._stamp: Any = None
        self._prompts: list[Prompt] = []
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PromptRewriter:
        await self._refresh()
        self._watch = asyncio.create_task(self._look_for_the_first())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    async def put(self, question: Question, rollout: RolloutName) -> Question:
        """Return the question with prompts put in, as the record has it. The agent's own texts are kept beside it.

        A prompt is its agent's message of a role, or, where the agent has no name, the message with a text that one of
        the prompt's versions has. A rollout keeps the version that it began with. What fits no prompt goes unchanged.
        """
        if not self._prompts:
            return question
        await self._refresh()
        placed: list[_Place] = []
        body = original = question.body
        for prompt in self._prompts:
            place = find(question.endpoint, original, prompt.role)
            if place is None or any(place == other.place for other in placed):
                continue
            sent = text_at(original, place)
            if not _fits(prompt, rollout.agent, sent):
                continue
            version = await self._table.kept_by(rollout.rollout_id, prompt.name)
            if version is None and await self._table.has_begun(rollout.rollout_id, rollout.agent):
                continue  # it began with the agent's own text, before there was this prompt
            version = version or prompt.live
            body = put(body, place, prompt.text_of(version))
            placed.append(_Place(prompt.name, version, place, sent))
        self._count("placed" if placed else "unmatched")
        if not placed:
            return question
        if any(text_at(body, one.place) != one.sent for one in placed):
            question = question._replace(body=body, request=question.request.with_body(encode(body)))
        return question._replace(also=partial(self._statements, placed, original))

    async def _refresh(self) -> None:
        if (stamp := await self._table.stamp()) != self._stamp:
            self._prompts, self._stamp = await self._table.all(), stamp

    async def _look_for_the_first(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(StoreUnavailable):
                await self._refresh()

    def _statements(self, placed: Sequence[_Place], original: Json, start: CallStart) -> list[Statement]:
        by_name = {prompt.name: prompt for prompt in self._prompts}
        kept = self._redactor.value(original, "request")
        made: list[Statement] = []
        for one in placed:
            row: dict[str, Any] = {"rollout_id": start.rollout.rollout_id, "call_id": start.call_id, "name": one.name}
            row |= {"version": one.version, "place": dumps(one.place)}
            known = by_name[one.name].version_of(one.sent)
            sent = None if known is not None else _text_left(kept, one.place)
            made += [(ROLLOUT_PROMPT_KEPT, row), (CALL_PROMPT, row | {"sent_version": known, "sent": sent})]
        return made


def _fits(prompt: Prompt, agent: str | None, sent: str) -> bool:
    if prompt.agent is not None and agent is not None:
        return agent == prompt.agent
    return prompt.version_of(sent) is not None


def _text_left(kept: Any, place: Place) -> str:
    """A text after redaction."""
    try:
        return text_at(kept, place)
    except (TypeError, LookupError):
        return MASK


def find(endpoint: str, request: Json, role: Role) -> Place | None:
    """Return the place of the first message of a role; None if there is none, or it is not one text alone.

    A request that continues a conversation kept by the server lacks the user's first message.
    """
    if role == "user" and (request.get("previous_response_id") or request.get("conversation")):
        return None
    return next(filter(None, _places(endpoint, request, role)), None)


def _places(endpoint: str, request: Json, role: Role) -> Iterator[Place | None]:
    own = _OWN.get((endpoint, role))
    if own is not None and request.get(own):
        yield _text(request[own], (own,))
    if endpoint == "completions" and role == "user":
        yield _text(request.get("prompt"), ("prompt",))
    name = _LISTS.get(endpoint)
    messages = request.get(name) if name else None
    if isinstance(messages, str) and endpoint == "responses" and role == "user":
        yield ("input",)
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") in _ROLES[role]:
            yield _text(message.get("content"), (name or "", i, "content"))
            return


def _text(content: Any, place: Place) -> Place | None:
    """The place of the one text in a content."""
    if isinstance(content, str):
        return place
    match content:
        case [{"type": kind, "text": str()}] if kind in _TEXTS:
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


def put(request: Json, place: Place, text: str) -> Json:
    """Return the request with another text there. What is on the way to it is copied, the rest is shared."""
    changed: Json = _put(request, place, text)
    return changed


def _put(value: Any, place: Place, text: str) -> Any:
    if not place:
        return text
    copied = value.copy()
    copied[place[0]] = _put(value[place[0]], place[1:], text)
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
        async with PromptRewriter(PromptTable(core.store.database), core.redactor, count) as prompts:
            yield Hooks(rewrite=prompts.put)

    async def check_rollouts(self, store: Store, added: OpenedWithPrompts) -> None:
        await PromptTable(store.database).check(added.prompts)

    async def rollouts_opened(self, store: Store, rollout_ids: Sequence[str], added: OpenedWithPrompts) -> None:
        await PromptTable(store.database).pin(rollout_ids, added.prompts)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        placed = await PromptTable(store.database).placed_in(rollout_id)
        return {"prompts": placed}


plugin = PromptsPlugin
