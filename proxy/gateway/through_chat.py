"""Finds the chat request that a request for Messages or Responses stands for, its earlier turns included.

`Templates` learns, once for each server, how its own route for Messages applies its chat template.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ...core.config.policy import PolicyConfig
from ...core.errors import InvalidRequest, LightningError, NotFound
from ...core.http import in_thread_if_large
from ...core.json_text import encode, loads
from ...core.records import CallEnd, CallStart, ModelCall
from ...store.store import Store
from ..dialects.as_chat.dialect import TRANSLATORS, ThroughChat, chat_request
from ..dialects.as_chat.translation import PROBES, Template, TemplateUnknown, Translation, Untranslatable, learn
from ..dialects.earlier import Earlier, Exchange, exchanges_up_to, items_of
from ..dialects.stream import Dialect
from .attempts import Upstreams
from .upstream import Request, Route

log = logging.getLogger(__name__)
Json = dict[str, Any]

UNKNOWN_PREVIOUS = "unknown previous_response_id on the server's own route: send the entire conversation"
NOT_AS_CHAT = "the chat route, which gives token ids, cannot stand for it"

_NOT_NOW = frozenset({401, 403, 429})  # it did not let this request in; it may the next one


class ApiRequest(NamedTuple):
    """A request: the name of its API in records, its dialect, and its JSON."""

    endpoint: str
    dialect: Dialect
    request: Request
    body: Json
    rollout_id: str


class ChatDecision(NamedTuple):
    """How a request goes upstream: through the chat route, or as it is; then `reason` may say why."""

    chat: ThroughChat | None = None
    reason: str | None = None


class ChatRoute:
    """Sends calls of the policy through the chat route, which alone gives the tokens of their answers.

    A request that continues such an answer has to go through it too, also to another model.
    """

    def __init__(self, config: PolicyConfig, store: Store, upstreams: Upstreams) -> None:
        self.translators = TRANSLATORS if config.dialects_through_chat else {}  # by endpoint
        self._history = Earlier(store)
        self._templates = Templates(upstreams)

    async def decide(self, api_request: ApiRequest, route: Route) -> ChatDecision:
        """Return whether a request goes through the chat route; its endpoint is one of `translators`.

        Raise NotFound if it continues an unknown response, InvalidRequest if no route can answer it.
        """
        is_policys = route.version is not None and route.upstream.kind == "vllm"
        if not (is_policys or self._continues_chat(api_request)):
            return ChatDecision()
        earlier = await self._earlier(api_request)
        if any(exchange.redacted for exchange in earlier):  # the model must not be shown masks
            return ChatDecision(reason=f"{NOT_AS_CHAT}: the record of the conversation it continues is redacted")
        try:
            translation = await self._translation(api_request, earlier, route)
            return ChatDecision(ThroughChat(api_request.dialect, translation, continues=bool(earlier)))
        except Untranslatable as untranslatable:
            reason = f"{NOT_AS_CHAT}: {untranslatable.reason}"
            if earlier and earlier[-1].by_chat:
                raise InvalidRequest(f"{reason}; {UNKNOWN_PREVIOUS}", param="previous_response_id") from None
            return ChatDecision(reason=reason)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # vLLM says what is wrong with it
            log.info("a request for %s goes as it is: %r", api_request.endpoint, error)
            return ChatDecision()

    def answered(self, start: CallStart, end: CallEnd) -> None:
        """Note that a call which went through the chat route has ended, and that its record is durable."""
        if start.endpoint == "responses":
            self._history.answered(start, end)

    def chat_of(self, call: ModelCall, known: Mapping[str, Exchange]) -> Json | None:
        """Return a recorded call's chat request; None if there is none. `known`: of its rollout, by response."""
        try:
            earlier = items_of(exchanges_up_to(known, call.request.get("previous_response_id")))
        except NotFound:
            return None
        return chat_request(call.endpoint, call.request, self._templates.of(call.upstream), earlier)

    async def _translation(self, api_request: ApiRequest, earlier: list[Exchange], route: Route) -> Translation:
        make, items = self.translators[api_request.endpoint], items_of(earlier)
        size = len(api_request.request.body) + sum(exchange.size for exchange in earlier)
        template = self._templates.of(route.upstream.name)
        try:
            return await in_thread_if_large(size, partial(make(template).request, api_request.body, items))
        except TemplateUnknown:
            template = await self._templates.learned(route, api_request.request)
            return await in_thread_if_large(size, partial(make(template).request, api_request.body, items))

    def _continues_chat(self, api_request: ApiRequest) -> bool:
        """Whether a request continues a response of the chat route, which no server knows."""
        previous = api_request.body.get("previous_response_id")
        return api_request.endpoint == "responses" and self._history.has_lately(api_request.rollout_id, previous)

    async def _earlier(self, api_request: ApiRequest) -> list[Exchange]:
        previous = api_request.body.get("previous_response_id") if api_request.endpoint == "responses" else None
        return await self._history.up_to(api_request.rollout_id, previous) if isinstance(previous, str) else []


class Templates:
    """Knows the templates of the servers that were probed. One that could not answer is probed again."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._known: dict[str, Template] = {}
        self._asking: dict[str, asyncio.Task[Template]] = {}

    def of(self, upstream: str | None) -> Template:
        """Return what is known of an upstream's template."""
        return self._known.get(upstream or "", Template())

    async def learned(self, route: Route, request: Request) -> Template:
        """Return a server's template; probe it with the credentials of the first request that needs it."""
        name = route.upstream.name
        if name in self._known:
            return self._known[name]
        if name not in self._asking:
            asking = self._asking[name] = asyncio.create_task(self._learned(route, request))
            asking.add_done_callback(lambda _: self._asking.pop(name))
        return await asyncio.shield(self._asking[name])

    async def _learned(self, route: Route, request: Request) -> Template:
        name = route.upstream.name
        probes = (self._ask(route, request, path, body | {"model": route.model}) for path, body in PROBES.values())
        try:
            answers = await asyncio.gather(*probes)
        except LightningError as error:  # the call itself will meet it, too
            log.info("upstream %s: its chat template is not known: %s", name, error.message)
            return Template()
        if any(status in _NOT_NOW or status >= 500 for status, _ in answers):
            return Template()
        self._known[name] = learn(dict(zip(PROBES, answers, strict=True)))
        return self._known[name]

    async def _ask(self, route: Route, request: Request, path: str, body: Json) -> tuple[int, Any]:
        probe = request._replace(method="POST", path=path, query=b"", body=encode(body))
        answer = await self._upstreams.open(route.upstream, probe)
        try:
            raw = await answer.read()
        finally:
            answer.release()
        try:
            read = loads(raw)
        except ValueError:
            read = None
        return answer.status, read if isinstance(read, dict) else {}
