"""Finds the chat request that a request for Messages or Responses stands for, its earlier turns included."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..apis.as_chat.dialect import ThroughChat
from ..apis.as_chat.template import TemplateUnknown
from ..apis.as_chat.translation import Translation, Untranslatable
from ..apis.as_chat.translators import TRANSLATORS, chat_request
from ..apis.dialects import Dialect
from ..apis.tools import dicts
from ..aside import aside
from ..config.policy import PolicyConfig
from ..errors import NotFound
from ..store.store import Store
from ..types import ModelCall
from ..upstreams.attempts import Upstreams
from ..upstreams.base import Request, Route
from .templates import Templates

log = logging.getLogger(__name__)
Json = dict[str, Any]


AS_IT_IS = "the chat route, which gives token ids, cannot stand for it"


class Asked(NamedTuple):
    """A request: the name of its API in records, how that is spoken, and its JSON."""

    endpoint: str
    dialect: Dialect
    request: Request
    body: Json
    rollout_id: str


class Way(NamedTuple):
    """How a request goes upstream: through the chat route, or as it is; then `reason` may say why."""

    chat: ThroughChat | None = None
    reason: str | None = None


class ChatRoute:
    """Sends calls of the policy through the chat route, which alone gives the tokens of their answers."""

    def __init__(self, config: PolicyConfig, store: Store, upstreams: Upstreams) -> None:
        self._translators = TRANSLATORS if config.dialects_through_chat else {}
        self._calls = store.calls
        self._templates = Templates(upstreams)

    async def way(self, asked: Asked, route: Route) -> Way:
        """Return how a request goes. Raise NotFound if it continues an unknown response."""
        if asked.endpoint not in self._translators or route.version is None or route.upstream.kind != "vllm":
            return Way()
        earlier = await self._earlier(asked)
        try:
            return Way(ThroughChat(asked.dialect, await self._translation(asked, earlier, route)))
        except Untranslatable as untranslatable:
            return Way(reason=f"{AS_IT_IS}: {untranslatable.reason}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # vLLM says what is wrong with it
            log.info("a request for %s goes as it is: %r", asked.endpoint, error)
            return Way()

    def chat_of(self, call: ModelCall, known: Mapping[str, ModelCall]) -> Json | None:
        """Return a recorded call's chat request; None if there is none. `known`: its rollout's calls, by response."""
        try:
            earlier = earlier_items(known, call.request.get("previous_response_id"))
        except NotFound:
            return None
        return chat_request(call.endpoint, call.request, self._templates.of(call.upstream), earlier)

    async def _translation(self, asked: Asked, earlier: list[Json], route: Route) -> Translation:
        make, size = self._translators[asked.endpoint], len(asked.request.body)
        template = self._templates.of(route.upstream.name)
        try:
            return await aside(size, partial(make(template).request, asked.body, earlier))
        except TemplateUnknown:
            template = await self._templates.learned(route, asked.request)
            return await aside(size, partial(make(template).request, asked.body, earlier))

    async def _earlier(self, asked: Asked) -> list[Json]:
        previous = asked.body.get("previous_response_id")
        if not isinstance(previous, str):
            return []
        try:
            calls = await self._calls.of(asked.rollout_id)
        except NotFound:
            calls = []
        return earlier_items(by_response(calls), previous)


def by_response(calls: Iterable[ModelCall]) -> dict[str, ModelCall]:
    """Return the answered calls by the id of their response."""
    answered = (call for call in calls if call.status == "ok" and isinstance(call.response, dict))
    return {str(call.response.get("id")): call for call in answered}


def earlier_items(known: Mapping[str, ModelCall], previous: str | None) -> list[Json]:
    """Return all that was asked and answered up to a response, oldest first. Raise NotFound if one is unknown."""
    turns: list[list[Json]] = []
    while isinstance(previous, str):
        call = known.get(previous)
        if call is None or len(turns) > len(known):
            raise NotFound(f"Response with id '{previous}' not found in its rollout", param="previous_response_id")
        turns.append([*_asked(call.request.get("input")), *dicts(call.response.get("output"))])
        previous = call.request.get("previous_response_id")
    return [item for turn in reversed(turns) for item in turn]


def _asked(said: Any) -> list[Json]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else dicts(said)
