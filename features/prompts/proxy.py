"""Replaces agents' prompts with versioned ones in requests of all recorded APIs, and serves the prompts' routes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, StrictFloat, StrictInt

from ...core.errors import Conflict, NotFound
from ...core.json_text import dumps, encode
from ...core.records import CallStart, RolloutName, check_id
from ...core.redact import MASK, Redactor
from ...proxy.api.bodies import INTEGER, Body, Id, Listed, PathId
from ...proxy.api.requests import AdminRoute, AgentRoute, ControlRequest, UserRoute
from ...proxy.api.rollouts import RolloutDetail, RolloutsBody
from ...proxy.gateway.call import Question
from ...proxy.gateway.recorder import Statement
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.database import Database, Transaction, read
from ...store.store import Store

LOOK_S = 0.5  # between looks for the first prompt; then every call looks
MOST_CHARACTERS = 1_000_000
Json = dict[str, Any]
Role = Literal["system", "user"]
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
ByMode = dict[Literal["train", "eval"], dict[str, float]]
_LIVE = "SELECT version FROM prompt_log WHERE name = {name} ORDER BY n DESC LIMIT 1"
PROMPTS_ALL = f"SELECT name, agent, role, ({_LIVE.format(name='prompts.name')}) AS live FROM prompts ORDER BY name"
PROMPT_VERSIONS = "SELECT * FROM prompt_versions ORDER BY name, version"
PROMPT_NEW = """
INSERT INTO prompts (name, agent, role, created_at) VALUES (:name, :agent, :role, :at) ON CONFLICT (name) DO NOTHING
"""
PROMPT_OF_NAME = f"SELECT agent, role, ({_LIVE.format(name=':name')}) AS live FROM prompts WHERE name = :name"
PROMPT_VERSION_OF_TEXT = """
SELECT version FROM prompt_versions WHERE name = :name AND text = :text ORDER BY version LIMIT 1
"""
PROMPT_VERSION_NEW = """
INSERT INTO prompt_versions (name, version, text, parent, comment, metrics, created_at)
SELECT :name, COALESCE(MAX(version), 0) + 1, :text, :parent, :comment, :metrics, :at
FROM prompt_versions WHERE name = :name
RETURNING version
"""
PROMPT_METRICS = "UPDATE prompt_versions SET metrics = :metrics WHERE name = :name AND version = :version"
PROMPT_BACK = """
INSERT INTO prompt_log (name, version)
SELECT name, MAX(version) FROM prompt_log WHERE name = :name AND version < :version GROUP BY name RETURNING version
"""
PROMPT_LOG = "INSERT INTO prompt_log (name, version) VALUES (:name, :version)"
PROMPTS_CHANGED = "SELECT (SELECT MAX(n) FROM prompt_log) AS live, (SELECT MAX(rowid) FROM prompt_versions) AS made"
ROLLOUT_PROMPT = "SELECT version FROM rollout_prompts WHERE rollout_id = :rollout_id AND name = :name"
AGENT_HAS_CALLED = "SELECT 1 FROM calls WHERE rollout_id = :rollout_id AND agent IS :agent LIMIT 1"
ROLLOUT_PROMPT_KEPT = """
INSERT INTO rollout_prompts (rollout_id, name, version)
SELECT rollout_id, :name, :version FROM rollouts WHERE rollout_id = :rollout_id
ON CONFLICT (rollout_id, name) DO NOTHING
"""
CALL_PROMPT = """
INSERT INTO call_prompts (call_id, name, version, place, sent_version, sent)
VALUES (:call_id, :name, :version, :place, :sent_version, :sent)
"""
CALL_PROMPTS_OF = """
SELECT call_prompts.call_id, call_prompts.name, call_prompts.version, place,
    COALESCE(sent, prompt_versions.text) AS sent
FROM calls JOIN call_prompts USING (call_id) LEFT JOIN prompt_versions
    ON prompt_versions.name = call_prompts.name AND prompt_versions.version = sent_version
WHERE calls.rollout_id = :rollout_id ORDER BY calls.seq, call_prompts.name
"""
PROMPT_REWARDS = """
SELECT version, mode, AVG(reward) AS mean, COUNT(*) AS rollouts
FROM rollout_prompts JOIN rollouts USING (rollout_id)
WHERE name = :name AND reward IS NOT NULL AND (NOT :own OR rollouts.key_id IS :key_id) GROUP BY version, mode
"""
# Oldest first. Whoever opens rollouts can name a run: of others, only keys that give evidence count.
PROMPT_RUN = r"""
SELECT rollouts.rollout_id, version, task_id, mode, status, reward,
    COALESCE(metadata ->> '$.held_out', 0) AS held_out
FROM rollout_prompts JOIN rollouts USING (rollout_id)
WHERE name = :name AND metadata ->> '$.optimize' = COALESCE(:run, metadata ->> '$.optimize')
    AND (rollouts.key_id IS :key_id OR (NOT :own AND evidence = 1)) ORDER BY n
/* PostgreSQL:
SELECT rollouts.rollout_id, version, task_id, mode, status, reward,
    COALESCE(metadata::json ->> 'held_out' NOT IN ('false', '0'), FALSE) AS held_out
FROM rollout_prompts JOIN rollouts USING (rollout_id)
WHERE name = :name AND CASE WHEN strpos(metadata, '\u') = 0 THEN
        metadata::json ->> 'optimize' = COALESCE(:run, metadata::json ->> 'optimize') END
    AND (rollouts.key_id IS :key_id OR (NOT :own AND evidence = 1)) ORDER BY n
*/
"""


@dataclass(frozen=True, slots=True)
class PromptVersion:
    """One text of a prompt. `parent`: the version that it was made from. `metrics`: measured by its maker.

    `rewards`, by mode: the mean reward, and the number of rollouts with this version that have a reward.
    """

    version: int
    text: str
    created_at: float
    parent: int | None
    comment: str | None
    metrics: dict[str, Any]
    live: bool
    rewards: ByMode


@dataclass(frozen=True, slots=True)
class Prompt:
    """An agent's message, found by agent or by text, and the versions of its text. `live`: the live version."""

    name: str
    agent: str | None
    role: Role
    live: int
    versions: list[PromptVersion]

    def text_of(self, version: int) -> str:
        """Return the text of a version. Raises NotFound if there is none."""
        if not 1 <= version <= len(self.versions):
            raise NotFound(f"prompt {self.name!r} has no version {version}", param="version")
        return self.versions[version - 1].text

    def version_of(self, text: str) -> int | None:
        return next((one.version for one in self.versions if one.text == text), None)


@dataclass(frozen=True, slots=True)
class Placed:
    """The version that replaced the text that the agent `sent`. `place`: the path to this text in the request."""

    call_id: str
    name: str
    version: int
    place: list[str | int]
    sent: str


@dataclass(frozen=True, slots=True)
class TriedOut:
    """A rollout in which an optimisation tried a version. `held_out`: its task was not part of the search."""

    rollout_id: str
    version: int
    task_id: str
    mode: str
    status: str
    reward: float | None
    held_out: bool


async def all_prompts(database: Database) -> list[Prompt]:
    versions = defaultdict[str, list[PromptVersion]](list)
    prompts = await database.all(PROMPTS_ALL)
    live = {row["name"]: row["live"] for row in prompts}
    for row in await database.all(PROMPT_VERSIONS):
        is_live = live.get(row["name"]) == row["version"]
        versions[row["name"]].append(read(PromptVersion, row, live=is_live, rewards={}))
    return [read(Prompt, row, versions=versions[row["name"]]) for row in prompts]


async def prompt_of(database: Database, name: str, version: int | None = None) -> Prompt:
    """Return the prompt with this name. Raises NotFound if it or the requested version does not exist."""
    for prompt in await all_prompts(database):
        if prompt.name == name:
            prompt.text_of(version or prompt.live)
            return prompt
    raise NotFound(f"no prompt {name!r}", param="name")


async def pin(database: Database, rollout_ids: Sequence[str], versions: Mapping[str, int]) -> None:
    """Pin rollouts to these versions, unless they are pinned already. Unknown rollouts are ignored."""
    rows = [
        {"rollout_id": rollout_id, "name": name, "version": version}
        for rollout_id in rollout_ids
        for name, version in versions.items()
    ]
    await database.commit([(ROLLOUT_PROMPT_KEPT, rows)])


async def kept_by(database: Database, rollout_id: str, name: str) -> int | None:
    """Return the version that a rollout is pinned to; None if it has none yet."""
    row = await database.quick(ROLLOUT_PROMPT, {"rollout_id": rollout_id, "name": name})
    return None if row is None else int(row["version"])


class _Put(NamedTuple):
    prompt: Prompt
    version: int
    place: Place
    sent: str


class PromptRewriter:
    """Puts prompts into requests. While there are no prompts, it looks for new ones at most every `LOOK_S` seconds."""

    def __init__(self, database: Database, redactor: Redactor) -> None:
        self._db, self._redactor = database, redactor
        self._stamp: tuple[Any, ...] = ()  # changes with every new version and promotion
        self._looked = -LOOK_S
        self._prompts: list[Prompt] = []

    async def put(self, question: Question, rollout: RolloutName) -> Question:
        """Return the question with prompts in place of the agent's texts, which are stored too.

        A prompt replaces the first message of its role that its agent sends. If the prompt or the request names no
        agent, that message must be the text of one of its versions. A rollout keeps the text that it began with.
        """
        if self._prompts or time.monotonic() >= self._looked + LOOK_S:
            self._looked = time.monotonic()
            stamp = tuple(await self._db.quick(PROMPTS_CHANGED) or ())
            if stamp != self._stamp:
                self._prompts, self._stamp = await all_prompts(self._db), stamp
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
            version = await kept_by(self._db, rollout.rollout_id, prompt.name)
            caller = {"rollout_id": rollout.rollout_id, "agent": rollout.agent}
            if version is None and await self._db.quick(AGENT_HAS_CALLED, caller):
                continue  # it began with the agent's own text, before there was this prompt
            placed.append(_Put(prompt, version or prompt.live, place, sent))
            body = put(body, place, prompt.text_of(placed[-1].version))
        if not placed:
            return question
        if any(text_at(body, one.place) != one.sent for one in placed):
            question = question._replace(body=body, request=question.request.with_body(encode(body)))
        return question._replace(also=partial(self._statements, placed, original))

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
    """Return the place of the first message with a role; None if there is none, or it is not a single text.

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
    """The place of a content's only text."""
    match content:
        case str():
            return place
        case [{"type": "text" | "input_text", "text": str()}]:
            return (*place, 0, "text")
    return None


def text_at(request: Json, place: Place) -> str:
    """Return the text at a place that `find` returned. Raises TypeError or LookupError if it is no longer there."""
    value: Any = request
    for step in place:
        value = value[step]
    if not isinstance(value, str):
        raise TypeError(f"no text at {place}")
    return value


def put(value: Any, place: Place, text: str) -> Any:
    """Return the request with another text at that place. Objects on the path are copied, and the rest is shared."""
    if not place:
        return text
    copied = value.copy()
    copied[place[0]] = put(value[place[0]], place[1:], text)
    return copied


class Match(Body):
    """The message that a prompt replaces: the first one of `role` that `agent` sends.

    Without an agent, here or in the request, the message must also have the text of one of the prompt's versions.
    """

    agent: Id | None = None
    role: Role = "system"


class PromptBody(Body):
    """A prompt's text. The first text under a new name should be the agent's own, and is live at once.

    `match` (default: any agent's system message) is set with the first version, and cannot change. `parent`: the
    version that this one was made from. `promote`: make it live.
    """

    name: Id
    text: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
    match: Match | None = None
    parent: Version | None = None
    comment: Annotated[str, Field(max_length=10_000)] | None = None
    metrics: Annotated[dict[str, StrictInt | StrictFloat | str | None], Field(default_factory=dict)]
    promote: Annotated[bool, Field(strict=True)] = False


class PromptVersionBody(Body):
    version: Version


class PromptSeen(BaseModel):
    """`version` and `text` are those of the requested version, or else of the rollout's, or else of the live one."""

    name: str
    match: Match
    live_version: int
    version: int
    text: str
    versions: list[PromptVersion]


async def add(database: Database, body: PromptBody) -> int:
    """Add the version if its text is new, and return its number. Raises Conflict if the prompt has another `match`."""
    match = body.match or Match()
    row: Json = body.model_dump() | match.model_dump() | {"metrics": dumps(body.metrics), "at": time.time()}

    async def work(db: Transaction) -> int:
        await db.all(PROMPT_NEW, row)
        (kept,) = await db.all(PROMPT_OF_NAME, row)
        if body.match is not None and (kept["agent"], kept["role"]) != (match.agent, match.role):
            message = f"the {kept['role']} message of {kept['agent'] or 'any agent'}; choose another name"
            raise Conflict(f"prompt {body.name!r} is for another message: {message}", param="match")
        version = await db.one(PROMPT_VERSION_OF_TEXT, row) or await db.one(PROMPT_VERSION_NEW, row)
        assert version is not None
        row["version"] = version["version"]
        if body.metrics:
            await db.all(PROMPT_METRICS, row)
        if kept["live"] is None or (body.promote and kept["live"] != row["version"]):
            await db.all(PROMPT_LOG, row)
        return int(row["version"])

    return await database.write(work, len(body.text))


@router.get("/prompts", response_model=Listed[PromptSeen])
async def list_prompts(request: ControlRequest) -> dict[str, Any]:
    """All prompts, by name, with their versions."""
    return {"data": [await _seen(request, prompt) for prompt in await all_prompts(request.parts.store.database)]}


@agents.get("/prompts/{name}", response_model=PromptSeen)
async def get_prompt(
    request: ControlRequest, name: PathId, version: Annotated[int | None, Query(ge=1)] = None
) -> dict[str, Any]:
    """A prompt, for an agent that asks for its text.

    A rollout (by key or `X-Rollout-Id`) gets the version that it is pinned to. If it has none, it is pinned to the live
    one. With `version`, it gets that one, and nothing is pinned. A rollout's own key cannot choose a `version` or see
    `versions`.
    """
    caller, database = request.caller, request.parts.store.database
    rollout_id = caller.rollout_id or request.headers.get("x-rollout-id")
    prompt = await prompt_of(database, check_id(name, "name"))
    if caller.rollout_id is not None:
        version = None
    if rollout_id is not None:
        await request.parts.keys.require(caller, [check_id(rollout_id, "rollout_id")])
        if version is None:
            await pin(database, [rollout_id], {name: prompt.live})
            version = await kept_by(database, rollout_id, name)
    return await _seen(request, prompt, version)


@router.get("/prompts/{name}/rollouts", response_model=Listed[TriedOut])
async def list_tried_out(request: ControlRequest, name: PathId, run: Id | None = None) -> dict[str, Any]:
    """The rollouts in which optimisations have tried versions of a prompt, oldest first. `run`: one optimisation's id.

    Lists only rollouts opened with the caller's key and, unless its scope is `own`, an admin's or an evaluator's.
    """
    caller, database = request.caller, request.parts.store.database
    await prompt_of(database, check_id(name, "name"))
    wanted = {"name": name, "run": run, "own": caller.own, "key_id": caller.key_id}
    return {"data": await database.records(TriedOut, PROMPT_RUN, **wanted)}


@admins.post("/prompts", response_model=PromptSeen)
async def post_prompt(request: ControlRequest, body: PromptBody) -> dict[str, Any]:
    """Add a prompt, or a version of one. If a version already has this text, return that one."""
    version = await add(request.parts.store.database, body)
    if body.promote:
        request.caller.log_change(f"version {version} of prompt {body.name} was promoted")
    return await _seen(request, body.name, version)


@admins.post("/prompts/{name}/promote", response_model=PromptSeen)
async def promote_prompt(request: ControlRequest, name: PathId, body: PromptVersionBody) -> dict[str, Any]:
    """Make a version live now. Rollouts that have begun keep theirs."""
    database = request.parts.store.database
    await prompt_of(database, check_id(name, "name"), body.version)
    await database.execute(PROMPT_LOG, name=name, version=body.version)
    request.caller.log_change(f"version {body.version} of prompt {name} was promoted")
    return await _seen(request, name)


@admins.post("/prompts/{name}/rollback", response_model=PromptSeen)
async def rollback_prompt(request: ControlRequest, name: PathId) -> dict[str, Any]:
    """Go back to the newest older version that was ever live."""
    database = request.parts.store.database
    live = (await prompt_of(database, check_id(name, "name"))).live
    if not await database.write(lambda db: db.all(PROMPT_BACK, {"name": name, "version": live})):
        raise Conflict(f"prompt {name!r} has no version older than {live} that was ever live")
    request.caller.log_change(f"prompt {name} was rolled back")
    return await _seen(request, name)


async def _seen(request: ControlRequest, prompt: Prompt | str, version: int | None = None) -> dict[str, Any]:
    """The part of a prompt that the caller may see. A rollout's own key does not see the versions."""
    caller, database = request.caller, request.parts.store.database
    prompt = await prompt_of(database, prompt) if isinstance(prompt, str) else prompt
    versions, version = list[PromptVersion](), version or prompt.live
    if caller.rollout_id is None:
        rewards = defaultdict[int, ByMode](dict)
        of_whom = {"name": prompt.name, "own": caller.own, "key_id": caller.sees}
        for row in await database.all(PROMPT_REWARDS, of_whom):
            rewards[row["version"]][row["mode"]] = {"mean": row["mean"], "rollouts": row["rollouts"]}
        hidden: Json = {"metrics": {}, "comment": None} if caller.own else {}
        versions = [replace(one, rewards=rewards[one.version], **hidden) for one in prompt.versions]
    return {
        "name": prompt.name, "match": {"agent": prompt.agent, "role": prompt.role}, "live_version": prompt.live,
        "version": version, "text": prompt.text_of(version), "versions": versions,
    }  # fmt: skip


class OpenedWithPrompts(BaseModel):
    """`prompts`: versions by prompt name, for prompts that are not to use the live one."""

    prompts: Annotated[
        dict[Id, Version],
        Field(json_schema_extra={"additionalProperties": False}),  # in addition to the pattern of its names
    ] = {}


class RolloutPrompts(BaseModel):
    """`prompts`: what the model was shown instead of the agent's texts."""

    prompts: list[Placed]


class PromptsPlugin(ProxyPlugin):
    routers = (router, agents, admins)
    fields = ((RolloutsBody, OpenedWithPrompts), (RolloutDetail, RolloutPrompts))

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        yield Hooks(rewrite=PromptRewriter(core.store.database, core.redactor).put)

    async def check_rollouts(self, store: Store, added: OpenedWithPrompts) -> None:
        for name, version in added.prompts.items():
            await prompt_of(store.database, name, version)

    async def rollouts_opened(self, store: Store, rollout_ids: Sequence[str], added: OpenedWithPrompts) -> None:
        await pin(store.database, rollout_ids, added.prompts)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        return {"prompts": await store.database.records(Placed, CALL_PROMPTS_OF, rollout_id=rollout_id)}


plugin = PromptsPlugin
