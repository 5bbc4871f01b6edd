"""Reads the parts of a request that all routes of the control API handle in the same way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from typing import Annotated, Any

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse

from ...core.errors import InvalidRequest
from ...core.json_text import dumps, encoded_parts
from ...core.records import check_id
from ..access.auth import Caller, credentials
from .parts import Parts

Limit = Annotated[int, Query(ge=1, le=1000)]


def parts(request: Request) -> Parts:
    """Return the parts of the running proxy."""
    opened: Parts = request.app.state.parts
    return opened


def caller_of(request: Request) -> Caller:
    """Return who sent a request that a route of `door.py` let in."""
    caller: Caller = request.state.caller
    return caller


async def parts_for(request: Request, rollout_id: str) -> Parts:
    """Return the proxy's parts for a request about one rollout. The rollout's own key is enough for it."""
    p = parts(request)
    await p.keys.require(caller_of(request), [check_id(rollout_id, "rollout_id")])
    return p


async def parts_for_all(request: Request) -> Parts:
    """Return the proxy's parts for a request about no single rollout. A rollout's own key is not enough for it."""
    p = parts(request)
    await p.keys.require(caller_of(request), [])
    return p


def position_of(cursor: str | None) -> int | None:
    """Return where the next page begins. Raise InvalidRequest for a cursor that no page gave."""
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidRequest("cursor must be the next_cursor of an earlier page", param="cursor")
    return int(cursor)


def own_key(request: Request, idempotency_key: str | None) -> str | None:
    """Return the `Idempotency-Key`, made unique to its sender: another API key may use the same one."""
    sender = credentials(request.headers)
    if idempotency_key is None or not sender.strip():
        return idempotency_key
    return f"{blake2b(sender.encode(), digest_size=16).hexdigest()} {idempotency_key}"


def redacted_text(p: Parts, text: str | None) -> str | None:
    return None if text is None else p.redactor.text(text)


def json_response(value: Any) -> Response:
    """Return a response encoded as the store does. UTF-8 cannot hold all texts, and FastAPI is slow on long lists."""
    return Response(dumps(value), media_type="application/json")


async def large_response(view: Callable[[], dict[str, Any]]) -> Response:
    """Return a response like `json_response`, which may be large: it is put together and encoded in a thread.

    It is sent in parts, each when the one before has left, and forgotten.
    """
    parts = await asyncio.to_thread(lambda: deque(encoded_parts(view())))
    if len(parts) == 1:
        return Response(parts[0], media_type="application/json")
    length = {"content-length": str(sum(map(len, parts)))}
    return StreamingResponse(_each(parts), headers=length, media_type="application/json")


async def _each(parts: deque[bytes]) -> AsyncIterator[bytes]:
    while parts:
        yield parts.popleft()
