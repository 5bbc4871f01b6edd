"""Finds an agent's prompt in a request of any of the recorded APIs, and puts another text in its place. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .table import Role

Json = dict[str, Any]
Place = tuple[str | int, ...]  # the way from a request to a text in it

_ROLES = {"system": ("system", "developer"), "user": ("user",)}
# Where an API has a prompt that is no message.
_OWN = {("messages", "system"): "system", ("responses", "system"): "instructions"}
_LISTS = {"chat/completions": "messages", "messages": "messages", "responses": "input"}
_TEXTS = ("text", "input_text")


def find(endpoint: str, request: Json, role: Role) -> Place | None:
    """Return the place of the first message of a role; None if there is none, or it is not one text alone.

    A request that continues a conversation kept by the server lacks the user's first message.
    """
    if role == "user" and (request.get("previous_response_id") or request.get("conversation")):
        return None
    return next(filter(None, _places(endpoint, request, role)), None)


def _places(endpoint: str, request: Json, role: Role) -> Iterator[Place | None]:
    own = _OWN.get((endpoint, role))
    if own is not None and request.get(own):
        yield _text(request[own], (own,))
    if endpoint == "completions" and role == "user":
        yield _text(request.get("prompt"), ("prompt",))
    name = _LISTS.get(endpoint)
    messages = request.get(name) if name else None
    if isinstance(messages, str) and endpoint == "responses" and role == "user":
        yield ("input",)
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") in _ROLES[role]:
            yield _text(message.get("content"), (name or "", i, "content"))
            return


def _text(content: Any, place: Place) -> Place | None:
    """The place of the one text in a content."""
    if isinstance(content, str):
        return place
    match content:
        case [{"type": kind, "text": str()}] if kind in _TEXTS:
            return (*place, 0, "text")
    return None


def text_at(request: Json, place: Place) -> str:
    """Return the text at a place that `find` returned."""
    value: Any = request
    for step in place:
        value = value[step]
    if not isinstance(value, str):
        raise TypeError(f"no text at {place}")
    return value


def put(request: Json, place: Place, text: str) -> Json:
    """Return the request with another text there. What is on the way to it is copied, the rest is shared."""
    changed: Json = _put(request, place, text)
    return changed


def _put(value: Any, place: Place, text: str) -> Any:
    if not place:
        return text
    copied = value.copy()
    copied[place[0]] = _put(value[place[0]], place[1:], text)
    return copied
