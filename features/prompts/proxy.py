"""Puts versioned prompts in the place of agents' own, in requests of any of the recorded APIs; and their routes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from ...core.json_text import dumps, encode
from ...core.records import CallStart, RolloutName, check_id
from ...core.redact import MASK, Redactor
from ...proxy.api.bodies import INTEGER, Body, Id, Listed, PathId
from ...proxy.api.requests import AdminRoute, AgentRoute, ControlRequest, UserRoute
from ...proxy.api.rollouts import RolloutDetail, RolloutsBody
from ...proxy.gateway.call import Question
from ...proxy.gateway.recorder import Statement
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from .table import CALL_PROMPT, ROLLOUT_PROMPT_KEPT, Placed, Prompt, PromptTable, PromptVersion, Role, TriedOut

LOOK_S = 0.5  # between looks for the first prompt; then every call looks
MOST_CHARACTERS = 1_000_000
Json = dict[str, Any]
Place = tuple[str | int, ...]  # the way from a request to a text in it
_ROLES = {"system": ("system", "developer"), "user": ("user",)}
# Where an API has a prompt that is not a message.
_OWN = {
    ("messages", "system"): "system", ("responses", "system"): "instructions", ("responses", "user"): "input",
    ("completions", "user"): "prompt",
}  # fmt: skip
_LISTS = {"chat/completions": "messages", "messages": "messages", "responses": "input"}
router = APIRouter(tags=["prompts"], route_class=UserRoute)
agents = APIRouter(tags=["prompts"], route_class=AgentRoute)
admins = APIRouter(tags=["prompts"], route_class=AdminRoute)
Version = Annotated[int, Field(strict=True, ge=1, lt=2**31), INTEGER]


class _Put(NamedTuple):
    prompt: Prompt
    version: int
    place: Place
    sent: str


class PromptRewriter:
    """All prompts. As long as there is none, a call costs nothing more."""

    def __init__(self, table: PromptTable, redactor: Redactor) -> None:
        self._table, self._redactor = table, redactor
        self._stamp: Any = None
        self._looked = -LOOK_S
        self._prompts: list[Prompt] = []

    async def put(self, question: Question, rollout: RolloutName) -> Question:
        """Return the question with prompts put in, as the record has it. The agent's own texts are kept, too.

        A prompt is its agent's message of a role, or, where the agent has no name, the message with a text that one of
        the prompt's versions has. A rollout keeps the version that it began with. What fits no prompt goes unchanged.
        """
        await self._refresh()
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
        for prompt, version, place, text in placed:
            if (sent_version := prompt.version_of(text)) is not None:
                sent = None
            else:
                try:
                    sent = text_at(kept, place)
                except (TypeError, LookupError):  # it is redacted
                    sent = MASK
            row: Json = {
                "rollout_id": start.rollout.rollout_id, "call_id": start.call_id, "name": prompt.name,
                "version": version, "place": dumps(place), "sent_version": sent_version, "sent": sent,
            }  # fmt: skip
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


class Match(Body):
    """The message: the first one of this role, of this agent, or of any agent if it has the text of a version."""

    agent: Id | None = None
    role: Role = "system"


class PromptBody(Body):
    """A prompt's text. The first one of a new name is the agent's own, and live.

    `match` is needed only for the first version. `parent`: the version that it was made from. `promote`: make it live.
    """

    name: Id
    text: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
    match: Match | None = None
    parent: Version | None = None
    comment: Annotated[str, Field(max_length=10_000)] | None = None
    metrics: Annotated[dict[str, float | int | str | None], Field(default_factory=dict)]
    promote: Annotated[bool, Field(strict=True)] = False


class PromptVersionBody(Body):
    version: Version


class PromptSeen(BaseModel):
    """`version` and `text`: of the rollout that asks; without one, or before it keeps any, the live ones."""

    name: str
    match: Match
    live_version: int
    version: int
    text: str
    versions: list[PromptVersion]


@router.get("/prompts", response_model=Listed[PromptSeen])
async def list_prompts(request: ControlRequest) -> dict[str, Any]:
    """All prompts, by name, with their versions."""
    return {"data": [await _seen(request, prompt) for prompt in await _table(request).all()]}


@agents.get("/prompts/{name}", response_model=PromptSeen)
async def get_prompt(
    request: ControlRequest, name: PathId, version: Annotated[int | None, Query(ge=1)] = None
) -> dict[str, Any]:
    """A prompt, for an agent that asks for its text.

    A rollout (its key, or `X-Rollout-Id`) gets the version that it keeps. If it is open and keeps none, it keeps the
    live one now, unless it asks for a `version`. A rollout's own key sees no `versions`.
    """
    caller, table = request.caller, _table(request)
    rollout_id = caller.rollout_id or request.headers.get("x-rollout-id")
    prompt = await table.get(check_id(name, "name"))
    if caller.rollout_id is not None:
        version = None
    if rollout_id is not None:
        await request.parts.keys.require(caller, [check_id(rollout_id, "rollout_id")])
        if version is None:
            await table.pin([rollout_id], {name: prompt.live})
            version = await table.kept_by(rollout_id, name)
    return await _seen(request, prompt, version)


@router.get("/prompts/{name}/rollouts", response_model=Listed[TriedOut])
async def list_tried_out(request: ControlRequest, name: PathId, run: Id | None = None) -> dict[str, Any]:
    """The rollouts in which optimisations have tried versions of a prompt, oldest first. `run` names one of them.

    Only the rollouts that were opened with the key that asks, an admin's or an evaluator's are listed.
    """
    caller, table = request.caller, _table(request)
    await table.get(check_id(name, "name"))
    return {"data": await table.tried_out(name, run, own=caller.own, key_id=caller.key_id)}


@admins.post("/prompts", response_model=PromptSeen)
async def post_prompt(request: ControlRequest, body: PromptBody) -> dict[str, Any]:
    """Add a prompt, or a version of one. A text that a version has already is that version."""
    match = None if body.match is None else (body.match.agent, body.match.role)
    version = await _table(request).add(body.name, body.model_dump(), match, promote=body.promote)
    if body.promote:
        request.caller.log_change(f"version {version} of prompt {body.name} was promoted")
    return await _seen(request, await _table(request).get(body.name), version)


@admins.post("/prompts/{name}/promote", response_model=PromptSeen)
async def promote_prompt(request: ControlRequest, name: PathId, body: PromptVersionBody) -> dict[str, Any]:
    """Make a version live now. Rollouts that have begun keep theirs."""
    await _table(request).promote(check_id(name, "name"), body.version)
    request.caller.log_change(f"version {body.version} of prompt {name} was promoted")
    return await _seen(request, await _table(request).get(name))


@admins.post("/prompts/{name}/rollback", response_model=PromptSeen)
async def rollback_prompt(request: ControlRequest, name: PathId) -> dict[str, Any]:
    """Make the version before the live one live again."""
    await _table(request).rollback(check_id(name, "name"))
    request.caller.log_change(f"prompt {name} was rolled back")
    return await _seen(request, await _table(request).get(name))


async def _seen(request: ControlRequest, prompt: Prompt, version: int | None = None) -> dict[str, Any]:
    """The prompt as the caller may see it: code that the policy runs can read its rollout's key."""
    caller, versions, version = request.caller, list[PromptVersion](), version or prompt.live
    if caller.rollout_id is None:
        rewards = await _table(request).rewards(prompt.name, own=caller.own, key_id=caller.sees)
        hidden: Json = {"metrics": {}, "comment": None} if caller.own else {}
        versions = [replace(one, rewards=rewards.get(one.version, {}), **hidden) for one in prompt.versions]
    return {
        "name": prompt.name, "match": {"agent": prompt.agent, "role": prompt.role}, "live_version": prompt.live,
        "version": version, "text": prompt.text_of(version), "versions": versions,
    }  # fmt: skip


def _table(request: ControlRequest) -> PromptTable:
    return PromptTable(request.parts.store.database)


class OpenedWithPrompts(BaseModel):
    """`prompts`: versions of prompts by name, if not the live ones."""

    prompts: Annotated[
        dict[Id, Version],
        Field(json_schema_extra={"additionalProperties": False}),  # in addition to the pattern of its names
    ] = {}


class RolloutPrompts(BaseModel):
    """`prompts`: what the model was shown in place of texts that the agent sent."""

    prompts: list[Placed]


class PromptsPlugin(ProxyPlugin):
    """Rewrites requests where there are prompts."""

    routers = (router, agents, admins)
    fields = ((RolloutsBody, OpenedWithPrompts), (RolloutDetail, RolloutPrompts))

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        yield Hooks(rewrite=PromptRewriter(PromptTable(core.store.database), core.redactor).put)

    async def check_rollouts(self, store: Store, added: OpenedWithPrompts) -> None:
        for name, version in added.prompts.items():
            await PromptTable(store.database).get(name, version)

    async def rollouts_opened(self, store: Store, rollout_ids: Sequence[str], added: OpenedWithPrompts) -> None:
        await PromptTable(store.database).pin(rollout_ids, added.prompts)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        return {"prompts": await PromptTable(store.database).placed_in(rollout_id)}


plugin = PromptsPlugin
