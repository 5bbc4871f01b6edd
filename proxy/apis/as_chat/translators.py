"""Lists the translators of the APIs whose requests can go through the chat route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .translation import Translator, Untranslatable

Json = dict[str, Any]

CHAT_ENDPOINT = "chat/completions"
# By the name of their endpoint in a record.
TRANSLATORS: Mapping[str, Translator] = MappingProxyType({})


def chat_request(endpoint: str, request: Json, earlier: Sequence[Json] = ()) -> Json | None:
    """Return a recorded request as the chat request that it was sent as; None if there is none."""
    if endpoint == CHAT_ENDPOINT:
        return request
    translator = TRANSLATORS.get(endpoint)
    try:
        return None if translator is None else translator.request(request, earlier).chat
    except Untranslatable:
        return None


def chat_answer(endpoint: str, response: Any) -> Any:
    """Return a recorded answer as the chat answer that a later request has in its history."""
    translator = TRANSLATORS.get(endpoint)
    if translator is None or not isinstance(response, dict):
        return response
    return {"choices": [{"index": 0, "message": translator.said(response)}]}
