"""Decides which Messages and Responses requests use the chat route, and translates them together with earlier turns."""

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
from ..dialects.as_chat.recorded import TRANSLATORS, Exchange, as_chat, exchange_of, exchanges_up_to, items_of
from ..dialects.as_chat.translation import (
    MALFORMED,
    PROBES,
    Template,
    TemplateUnknown,
    Translator,
    Untranslatable,
    learn,
)
from .attempts import Upstreams
from .recent import History
from .upstream import Request, Route

log = logging.getLogger(__name__)
Json = dict[str, Any]

UNKNOWN_PREVIOUS = "the server's own route cannot find previous_response_id, so send the entire conversation"
NOT_AS_CHAT = "the request cannot use the chat route, which gives token ids"

_NOT_NOW = frozenset({401, 403, 429})  # it refused this request; it may accept the next one


class ChatDecision(NamedTuple):
    """How a request goes upstream: through the chat route, or unchanged, in which case `reason` may say why."""

    chat: Translator | None = None
    reason: str | None = None


class ChatRoute:
    """Turns the policy's Messages and Responses calls, and calls that continue them, into chats to get token ids."""

    def __init__(self, config: PolicyConfig, store: Store, upstreams: Upstreams) -> None:
        self.translators = TRANSLATORS if config.dialects_through_chat else {}  # by endpoint
        self._templates = Templates(upstreams)
        self.history = History(store, self.chat_of if config.token_continuity == "exact" else None)

    async def decide(self, endpoint: str, request: Request, body: Json, rollout_id: str, route: Route) -> ChatDecision:
        """Return how a request goes upstream. Raises NotFound or InvalidRequest for an unusable previous response."""
        previous = body.get("previous_response_id") if endpoint == "responses" else ""
        previous = previous if isinstance(previous, str) else ""
        continued = self.history.known(rollout_id).exchanges.get(previous)
        is_policys = route.version is not None and route.upstream.kind == "vllm"
        if not (is_policys or (continued and continued.by_chat)):  # no server keeps a response of the chat route
            return ChatDecision()
        earlier = await self.history.up_to(rollout_id, previous) if previous else []
        if any(exchange.redacted for exchange in earlier):  # the model must not be shown masks
            return ChatDecision(reason=f"{NOT_AS_CHAT}: the record of the conversation it continues is redacted")
        items, size = items_of(earlier), len(request.body) + sum(exchange.size for exchange in earlier)

        async def translated(template: Template) -> ChatDecision:
            translator = self.translators[endpoint](body)
            translator.request = await in_thread_if_large(size, partial(translator.chat, template, items))
            translator.continues = bool(earlier)
            return ChatDecision(translator)

        try:
            try:
                return await translated(self._templates.of(route.upstream.name))
            except TemplateUnknown:
                return await translated(await self._templates.learned(route, request))
        except Untranslatable as untranslatable:
            reason = f"{NOT_AS_CHAT}: {untranslatable}"
            if earlier and earlier[-1].by_chat:
                raise InvalidRequest(f"{reason}; {UNKNOWN_PREVIOUS}", param="previous_response_id") from None
            return ChatDecision(reason=reason)
        except MALFORMED as error:  # vLLM says what is wrong with it
            log.info("a request for %s is forwarded unchanged: %r", endpoint, error)
            return ChatDecision()

    def answered(self, start: CallStart, end: CallEnd) -> None:
        """Keep what an answered Responses call added, for calls that continue it. Called once the call is recorded."""
        if start.endpoint == "responses" and end.status == "ok" and isinstance(end.response, dict):
            size = len(start.request_text or b"") + 8 * sum(len(choice.token_ids) for choice in end.choices)
            exchange = exchange_of(start.request, end.response)._replace(size=size)
            self.history.add(end.rollout_id, end.call_id, exchange=exchange)

    def chat_of(self, call: ModelCall, known: Mapping[str, Exchange]) -> Json | None:
        """Return a recorded call as a chat request; None if that fails. `known`: the rollout's exchanges."""
        try:
            earlier = items_of(exchanges_up_to(known, call.request.get("previous_response_id")))
        except NotFound:
            return None
        return as_chat(call.endpoint, call.request, self._templates.of(call.upstream), earlier)


class Templates:
    """Keeps the chat templates of probed servers. A server that could not answer is probed again."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._asked: dict[str, asyncio.Task[Template]] = {}  # of servers that answered, or are about to

    def of(self, upstream: str | None) -> Template:
        asked = self._asked.get(upstream or "")
        return asked.result() if asked is not None and asked.done() else Template()

    async def learned(self, route: Route, request: Request) -> Template:
        """Return a server's template. If it is unknown, probe the server with this request's credentials."""
        name = route.upstream.name
        if name not in self._asked:
            self._asked[name] = asyncio.create_task(self._learned(route, request))
        return await asyncio.shield(self._asked[name])

    async def _learned(self, route: Route, request: Request) -> Template:
        async def ask(path: str, body: Json) -> tuple[int, Json]:
            sent = request._replace(method="POST", path=path, query=b"", body=encode(body | {"model": route.model}))
            status, raw = await self._upstreams.ask(route.upstream, sent)
            try:
                return status, dict(loads(raw))
            except (TypeError, ValueError):
                return status, {}

        name = route.upstream.name
        try:
            answers = await asyncio.gather(*(ask(path, body) for path, body in PROBES.values()))
            if not any(status in _NOT_NOW or status >= 500 for status, _ in answers):
                return learn(dict(zip(PROBES, answers, strict=True)))
        except LightningError as error:  # the call itself will fail in the same way
            log.info("the chat template of upstream %s cannot be probed: %s", name, error.message)
        del self._asked[name]
        return Template()
