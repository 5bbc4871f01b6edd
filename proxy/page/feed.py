"""`GET /feed`: calls, rewards, rollouts, steps and versions as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import monotonic
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse

from ..access.sight import Sight
from ..control.answers import ERRORS
from ..control.bodies import Cursor
from ..control.door import AgentRoute
from ..control.requests import parts, parts_for_all
from ..errors import InvalidRequest, LightningError
from ..gateway.asgi import read_headers
from ..gateway.server import is_stopping
from ..json_text import dumps
from .events import FeedEvents, Happened

router = APIRouter(tags=["page"], responses=ERRORS, route_class=AgentRoute)

LOOK_S = 0.25  # from one look at the store to the next
LONGEST_S = 1.0  # where the store notifies of changes, and there is none
QUIET_S = 15.0  # after which a comment says that the feed is still there
AT_ONCE = 500  # events that are read and sent at a time

# Neither a browser nor a proxy on the way is to keep events back.
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("id", "event", "data")}}
_EVENTS = {200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}}


@router.get("/feed", response_class=StreamingResponse, responses=_EVENTS)  # type: ignore[arg-type]
async def feed(
    request: Request,
    cursor: Cursor = None,
    last_event_id: Annotated[str, Header(json_schema_extra={"pattern": "^[0-9]{0,18}$"})] = "",
) -> StreamingResponse:
    """Calls, rewards, rollouts, training steps and policy versions as they come, until the client or the proxy stops.

    It continues after `cursor`, an event's `id`, or begins now. `missed` comes first if events after the cursor are no
    longer kept: look at everything again. Of events about one thing that come at once, only the last is sent.
    """
    p = await parts_for_all(request)
    events = FeedEvents(p.store.database)
    # A browser sends an empty Last-Event-ID before the first.
    given = [_number(one) for one in (cursor, last_event_id or None) if one is not None]
    after = given[0] if given else await events.newest()
    nothing_missed = not given or await events.knows(after)
    frames = _frames(request, events, after if nothing_missed else await events.newest(), nothing_missed)
    return StreamingResponse(frames, headers=_HEADERS, media_type="text/event-stream")


def _number(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidRequest("cursor must be the id of an event of this feed", param="cursor")
    return int(cursor)


async def _frames(request: Request, events: FeedEvents, cursor: int, nothing_missed: bool) -> AsyncIterator[bytes]:
    yield b"id: %d\n\n" % cursor if nothing_missed else b"id: %d\nevent: missed\ndata: {}\n\n" % cursor
    sent_at, keys, headers = monotonic(), parts(request).keys, read_headers(request.scope)
    changes = parts(request).store.database.changes("calls", "rewards", "live", "steps", "keys")
    try:
        while not is_stopping(request.scope):
            sight = (await keys.authenticate(headers)).sight  # its key may have been revoked meanwhile
            before, happened = cursor, list[Happened]()
            if await events.newest() != cursor:
                happened, cursor = await events.after(cursor, AT_ONCE, own=sight.own, key_id=sight.key_id)
            if happened or monotonic() > sent_at + QUIET_S:
                sent_at = monotonic()
                yield b"".join(_frame(one, sight) for one in happened) or b":\nid: %d\n\n" % cursor
            if cursor - before < AT_ONCE:
                await changes.wait(LOOK_S, LONGEST_S)
    except LightningError as error:
        yield b": %s\n\n" % error.message.replace("\n", " ").encode()


def _frame(one: Happened, sight: Sight) -> bytes:
    data = one.data
    if one.kind == "step":
        data = sight.of("step event", data)
    elif one.kind == "version":
        data = sight.of("version event", data)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (one.n, one.kind.encode(), dumps(data).encode())
