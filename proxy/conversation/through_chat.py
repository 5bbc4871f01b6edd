"""Finds the chat request that a request for Messages or Responses stands for, its earlier turns included."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..apis.as_chat.dialect import ThroughChat
from ..apis.as_chat.translation import Untranslatable
from ..apis.as_chat.translators import TRANSLATORS
from ..apis.dialects import Dialect
from ..apis.tools import dicts
from ..aside import aside
from ..config.policy import PolicyConfig
from ..errors import NotFound
from ..store.store import Store
from ..types import ModelCall
from ..upstreams.base import Route

log = logging.getLogger(__name__)
Json = dict[str, Any]


class Way(NamedTuple):
    """How a request goes upstream: through the chat route, or as it is; then `reason` may say why."""

    chat: ThroughChat | None = None
    reason: str | None = None


class ChatRoute:
    """Sends calls of the policy through the chat route, which alone gives the tokens of their answers."""

    def __init__(self, config: PolicyConfig, store: Store) -> None:
        self._translators = TRANSLATORS if config.dialects_through_chat else {}
        self._calls = store.calls

    async def way(self, endpoint: str, dialect: Dialect, body: Json, size: int, rollout_id: str, route: Route) -> Way:
        """Return how a request of `size` bytes goes. Raise NotFound if it continues an unknown response."""
        translator = self._translators.get(endpoint)
        if translator is None or route.version is None or route.upstream.kind != "vllm":
            return Way()
        earlier = await self._earlier(rollout_id, body)
        try:
            translation = await aside(size, partial(translator.request, body, earlier))
        except Untranslatable as untranslatable:
            return Way(reason=untranslatable.reason)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # vLLM says what is wrong with it
            log.info("a request for %s goes as it is: %r", endpoint, error)
            return Way()
        return Way(ThroughChat(dialect, translation))

    async def _earlier(self, rollout_id: str, body: Json) -> list[Json]:
        previous = body.get("previous_response_id")
        if not isinstance(previous, str):
            return []
        try:
            calls = await self._calls.of(rollout_id)
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
