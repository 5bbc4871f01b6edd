"""Lists the translators of the APIs whose requests can go through the chat route."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .messages import MessagesTranslator
from .responses import ResponsesTranslator
from .template import Template
from .translation import Translator, Untranslatable

Json = dict[str, Any]

CHAT_ENDPOINT = "chat/completions"
# By the name of their endpoint in a record: what makes a translator for a server with this template.
TRANSLATORS: Mapping[str, Callable[[Template], Translator]] = MappingProxyType(
    {"messages": MessagesTranslator, "responses": lambda template: ResponsesTranslator()}
)
# An unknown one would make requests untranslatable, and what decides how an answer is sampled is the same with any.
_ANY_TEMPLATE = Template(merges_system=False, disabled_effort="none", ignores_no_tools=True)


def chat_request(endpoint: str, request: Json, template: Template, earlier: Sequence[Json] = ()) -> Json | None:
    """Return a recorded request as the chat request that it was sent as; None if there is none."""
    if endpoint == CHAT_ENDPOINT:
        return request
    make = TRANSLATORS.get(endpoint)
    try:
        return None if make is None else make(template).request(request, earlier).chat
    except (Untranslatable, LookupError, TypeError, ValueError, AttributeError):
        return None


def as_chat(endpoint: str, request: Json) -> Json | None:
    """Return a recorded request as some server's chat request, whatever its template; None if there is none."""
    return chat_request(endpoint, request, _ANY_TEMPLATE)


def chat_answer(endpoint: str, response: Any) -> Any:
    """Return a recorded answer as the chat answer that a later request has in its history."""
    make = TRANSLATORS.get(endpoint)
    if make is None or not isinstance(response, dict):
        return response
    return {"choices": [{"index": 0, "message": make(Template()).history_message(response)}]}
