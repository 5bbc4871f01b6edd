"""Finds the chat request that a request for Messages or Responses stands for, its earlier turns included."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ..apis.as_chat.dialect import ThroughChat
from ..apis.as_chat.template import TemplateUnknown
from ..apis.as_chat.translation import Translation, Untranslatable
from ..apis.as_chat.translators import TRANSLATORS, chat_request
from ..apis.dialects import Dialect
from ..aside import aside
from ..config.policy import PolicyConfig
from ..errors import InvalidRequest, NotFound
from ..store.store import Store
from ..types import CallEnd, CallStart, ModelCall
from ..upstreams.attempts import Upstreams
from ..upstreams.base import Request, Route
from .earlier import Earlier, Said, conversation, items_of
from .templates import Templates

log = logging.getLogger(__name__)
Json = dict[str, Any]


UNKNOWN_THERE = "its own route does not know the response that it goes on with: send the whole conversation"
AS_IT_IS = "the chat route, which gives token ids, cannot stand for it"


class ApiRequest(NamedTuple):
    """A request: the name of its API in records, how that is spoken, and its JSON."""

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

    Whoever goes on with such an answer has to take this way, too, also to another model.
    """

    def __init__(self, config: PolicyConfig, store: Store, upstreams: Upstreams) -> None:
        self.translators = TRANSLATORS if config.dialects_through_chat else {}  # by endpoint
        self._said = Earlier(store)
        self._templates = Templates(upstreams)

    async def way(self, asked: ApiRequest, route: Route) -> ChatDecision:
        """Return how a request goes, whose endpoint is one of `translators`.

        Raise NotFound if it continues an unknown response, InvalidRequest if no route can answer it.
        """
        is_policys = route.version is not None and route.upstream.kind == "vllm"
        if not (is_policys or self._goes_on(asked)):
            return ChatDecision()
        earlier = await self._earlier(asked)
        if any(said.redacted for said in earlier):  # the model is shown what was said, or nothing
            return ChatDecision(reason=f"{AS_IT_IS}: the record of what it goes on with is redacted")
        try:
            translation = await self._translation(asked, earlier, route)
            return ChatDecision(ThroughChat(asked.dialect, translation, goes_on=bool(earlier)))
        except Untranslatable as untranslatable:
            reason = f"{AS_IT_IS}: {untranslatable.reason}"
            if earlier and earlier[-1].by_chat:
                raise InvalidRequest(f"{reason}; {UNKNOWN_THERE}", param="previous_response_id") from None
            return ChatDecision(reason=reason)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # vLLM says what is wrong with it
            log.info("a request for %s goes as it is: %r", asked.endpoint, error)
            return ChatDecision()

    def answered(self, start: CallStart, end: CallEnd) -> None:
        """Note that a call which went through the chat route has ended, and that its record is durable."""
        if start.endpoint == "responses":
            self._said.answered(start, end)

    def chat_of(self, call: ModelCall, known: Mapping[str, Said]) -> Json | None:
        """Return a recorded call's chat request; None if there is none. `known`: of its rollout, by response."""
        try:
            earlier = items_of(conversation(known, call.request.get("previous_response_id")))
        except NotFound:
            return None
        return chat_request(call.endpoint, call.request, self._templates.of(call.upstream), earlier)

    async def _translation(self, asked: ApiRequest, earlier: list[Said], route: Route) -> Translation:
        make, items = self.translators[asked.endpoint], items_of(earlier)
        size = len(asked.request.body) + sum(said.size for said in earlier)
        template = self._templates.of(route.upstream.name)
        try:
            return await aside(size, partial(make(template).request, asked.body, items))
        except TemplateUnknown:
            template = await self._templates.learned(route, asked.request)
            return await aside(size, partial(make(template).request, asked.body, items))

    def _goes_on(self, asked: ApiRequest) -> bool:
        """Whether a request goes on with what went through the chat route lately, so that no server knows of it."""
        previous = asked.body.get("previous_response_id")
        return asked.endpoint == "responses" and self._said.has_lately(asked.rollout_id, previous)

    async def _earlier(self, asked: ApiRequest) -> list[Said]:
        previous = asked.body.get("previous_response_id") if asked.endpoint == "responses" else None
        return await self._said.up_to(asked.rollout_id, previous) if isinstance(previous, str) else []
