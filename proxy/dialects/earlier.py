"""The conversation that `previous_response_id` of a request to /v1/responses refers to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...core.errors import NotFound
from ...core.json_text import encode
from ...core.records import ModelCall
from ...core.redact import MASK, REASON
from ...core.tools import dicts

Json = dict[str, Any]


class Exchange(NamedTuple):
    """The items that one call added to its conversation, after the response `previous`: input and output.

    `by_chat`: it went through the chat route, so the server does not know the response. `redacted`: its record lacks
    something of the input or output. `size`: bytes, about.
    """

    response_id: str
    items: list[Json]
    previous: Any
    by_chat: bool = True
    redacted: bool = False
    size: int = 0


def by_response(calls: Iterable[ModelCall]) -> dict[str, Exchange]:
    """Return the exchanges of calls that were answered, by the id of their response."""
    known = dict[str, Exchange]()
    for call in calls:
        if isinstance(call.response, dict):
            exchange = exchange_of(call.request, call.response)
            text = encode(exchange.items)
            # Of one that continues another, the mask may stand in an earlier exchange.
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
            raise NotFound(f"Response with id '{previous}' not found in its rollout", param="previous_response_id")
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
