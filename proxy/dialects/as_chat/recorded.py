"""Reads recorded calls of other APIs as chat, and finds the conversation that a previous response ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ....core.errors import NotFound
from ....core.json_text import encode
from ....core.records import ModelCall
from ....core.redact import MASK, REASON
from ....core.tools import dicts
from .messages import MessagesTranslator
from .responses import ResponsesTranslator
from .translation import MALFORMED, Template, Translator

Json = dict[str, Any]

CHAT_ENDPOINT = "chat/completions"
# By the name of their endpoint in a record.
TRANSLATORS: dict[str, type[Translator]] = {"messages": MessagesTranslator, "responses": ResponsesTranslator}
# An unknown one would make requests untranslatable, and what decides how an answer is sampled is the same with any.
_ANY_TEMPLATE = Template(merges_system=False, disabled_effort="none", ignores_no_tools=True)


def as_chat(
    endpoint: str, request: Json, template: Template = _ANY_TEMPLATE, earlier: Sequence[Json] = ()
) -> Json | None:
    """Return a recorded request as a chat request; None if it cannot be translated."""
    try:
        return request if endpoint == CHAT_ENDPOINT else TRANSLATORS[endpoint](request).chat(template, earlier)
    except MALFORMED:
        return None


def chat_answer(endpoint: str, response: Any) -> Any:
    """Return a recorded answer in the form of a chat answer, whose message is as later requests repeat it."""
    if endpoint not in TRANSLATORS or not isinstance(response, dict):
        return response
    try:
        message = TRANSLATORS[endpoint].history(response)
    except MALFORMED:
        message = {"role": "assistant"}
    return {"choices": [{"index": 0, "message": message}]}


class Exchange(NamedTuple):
    """The input and output items that one call added to its conversation, after the response `previous`.

    `by_chat`: the call went through the chat route, so the server does not have the response. `redacted`: part of the
    input or output is not in the record. `size`: the approximate number of bytes.
    """

    response_id: str
    items: list[Json]
    previous: Any
    by_chat: bool = True
    redacted: bool = False
    size: int = 0


def by_response(calls: Iterable[ModelCall]) -> dict[str, Exchange]:
    """Return the exchanges of answered calls, by response id."""
    known = dict[str, Exchange]()
    for call in calls:
        if isinstance(call.response, dict):
            exchange = exchange_of(call.request, call.response)
            text = encode(exchange.items)
            # If this exchange continues another one, the mask may be in that one only.
            redacted = call.untrainable_reason == REASON and (exchange.previous is None or MASK.encode() in text)
            known[exchange.response_id] = exchange._replace(
                by_chat=bool(call.prompt_token_ids), redacted=redacted, size=len(text)
            )
    return known


def exchanges_up_to(known: Mapping[str, Exchange], previous: Any) -> list[Exchange]:
    """Return the exchanges up to a response, oldest first. Raise NotFound if one is unknown."""
    found: list[Exchange] = []
    while isinstance(previous, str):
        exchange = known.get(previous)
        if exchange is None or len(found) > len(known):
            raise NotFound(f"Response with id '{previous}' not found in this rollout", param="previous_response_id")
        found.append(exchange)
        previous = exchange.previous
    return found[::-1]


def items_of(exchanges: Iterable[Exchange]) -> list[Json]:
    """Return the items of all exchanges, in order."""
    return [item for exchange in exchanges for item in exchange.items]


def exchange_of(request: Json, response: Json) -> Exchange:
    """Return the exchange of a recorded Responses call."""
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else dicts(given)
    items = [*items, *dicts(response.get("output"))]
    return Exchange(str(response.get("id")), items, request.get("previous_response_id"))
