"""Parses request bodies, and writes them again for an upstream."""

from __future__ import annotations

import re
from typing import Any

import orjson

from ..apis.as_chat.dialect import PATH, ThroughChat
from ..apis.dialects import Dialect
from ..apis.inject import Injection
from ..aside import LARGE
from ..errors import InvalidRequest
from ..json_text import as_utf8, encode, loads, loads_in_turns, with_model
from ..upstreams.attempts import Target
from ..upstreams.base import Piece, Request, Route

_FORM_NAME = b'name="model"\r\n'
# The form field's other headers, its value, and the boundary that ends it.
_FORM_VALUE = re.compile(rb"(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--")


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; raise InvalidRequest for anything else."""
    try:
        value = loads(body) if len(body) < LARGE else loads_in_turns(body)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return value


def parse_any(body: bytes) -> dict[str, Any]:
    """Return the JSON object in an unrecorded body, or a form's `model`; empty if it is neither."""
    if _is_form(body):
        match = _form_model(body)
        return {} if match is None else {"model": match[1].decode(errors="replace")}
    try:
        body = as_utf8(body)
        return parse_object(body) if body.lstrip().startswith(b"{") else {}
    except InvalidRequest:
        return {}


def model_of(body: dict[str, Any]) -> str | None:
    """Return the model that a body asks for; None if it names none or has the wrong type."""
    model = body.get("model")
    return model if isinstance(model, str) else None


def chat_target(request: Request, chat: ThroughChat, route: Route, plain: bool) -> Target:
    """Return the request for the chat route that stands for one of another API. `plain`: as in `target_of`."""
    sent, injection = chat.chat | ({} if route.model is None else {"model": route.model}), Injection()
    if not plain and route.upstream.kind == "vllm":
        sent, injection = chat.inject(sent)
    asked = request._replace(path=PATH, query=b"", body=encode(sent), servers=route.servers)
    return Target(route, asked, sent, injection, translated=True)


def target_of(request: Request, body: dict[str, Any], dialect: Dialect | None, route: Route, plain: bool) -> Target:
    """Return the request for this upstream. For vLLM it has the dialect's additions, unless `plain`."""
    sent, injection = body, Injection()
    if route.servers:
        request = request._replace(servers=route.servers)
    if route.model is not None and isinstance(body.get("model"), str | None):  # the upstream refuses other types
        sent = body | {"model": route.model}
    if dialect is not None and not plain and route.upstream.kind == "vllm":
        sent, injection = dialect.inject(sent)
        if route.adds_usage:
            injection = injection._replace(usage=False)  # the chunk is not ours to take out
    return Target(route, _with_body(request, body, sent), sent, injection)


def _with_body(request: Request, body: dict[str, Any], sent: dict[str, Any]) -> Request:
    """The request with `sent` for its body, in the agent's own bytes where possible, with what was added at their end.

    So numbers keep their digits, and nothing is lost that a parser would lose.
    """
    changed = {name: value for name, value in sent.items() if name not in body or body[name] is not value}
    if not changed:
        return request
    if _is_form(request.body):
        return request.with_body(_with_form_model(request.body, sent["model"]))
    own: tuple[Piece, ...] | None = (request.body,)
    if "model" in changed and "model" in body:
        own = with_model(request.body.rstrip(), changed.pop("model"))
    if own is None or not body or any(name in body for name in changed):
        return request.with_body(encode(sent))
    request = request.with_body(*own)
    return request.with_members(orjson.dumps(changed)) if changed else request


def _is_form(body: bytes) -> bool:
    """Whether a body begins as multipart/form-data does, in which sound and pictures are sent."""
    return body.startswith(b"--")


def _form_model(body: bytes) -> re.Match[bytes] | None:
    at = body.find(_FORM_NAME)
    return None if at < 0 else _FORM_VALUE.match(body, at + len(_FORM_NAME))


def _with_form_model(body: bytes, model: str) -> bytes:
    match = _form_model(body)
    return body if match is None else body[: match.start(1)] + model.encode() + body[match.end(1) :]
