"""`GET /feed`: calls, rewards, rollouts, steps and versions as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from ...core.errors import LightningError
from ...core.json_text import dumps, loads_rounded
from ...proxy.api.bodies import Cursor
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.gateway.asgi import read_headers
from ...proxy.gateway.server import is_stopping
from ...store.database import Feed

router = APIRouter(tags=["page"], route_class=UserRoute)
LOOK_S = 0.25  # from one look at the store to the next
QUIET_S = 15.0  # after which a comment says that the feed is still there
AT_ONCE = 500  # events that are read and sent at a time
# Neither a browser nor a proxy on the way is to keep events back.
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("id", "event", "data")}}
_EVENTS = {200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}}
Kind = Literal["call", "reward", "rollout", "step", "version"]
AFTER = "SELECT n, kind, ref FROM feed WHERE n > :cursor ORDER BY n LIMIT :limit"
# By kind: its rows, with `ref`, and the key that opened the rollout.
FEED_CALLS = """
SELECT calls.call_id AS ref, calls.call_id, calls.rollout_id, calls.seq, calls.agent, calls.status, calls.model,
    calls.policy_version, calls.latency_ms, calls.finish_reason, rollouts.task_id, rollouts.key_id
FROM calls JOIN rollouts USING (rollout_id) WHERE calls.call_id IN (SELECT CAST(value AS TEXT) FROM json_each(:refs))
"""
FEED_REWARDS = """
SELECT reward_id AS ref, reward_id, rewards.rollout_id, call_id, name, rewards.value AS reward, source,
    rewards.created_at AS at, rollouts.key_id
FROM rewards JOIN rollouts USING (rollout_id) WHERE reward_id IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
FEED_ROLLOUTS = """
SELECT n AS ref, rollout_id, task_id, mode, status, reward, key_id
FROM rollouts WHERE n IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
FEED_STEPS = """
SELECT step AS ref, step, status, version, metrics
FROM steps WHERE step IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
FEED_VERSIONS = """
SELECT policy_versions.version AS ref, policy_versions.version, status, verified,
    policy_versions.version = (SELECT version FROM policy_log ORDER BY n DESC LIMIT 1) AS live
FROM policy_versions WHERE policy_versions.version IN (SELECT CAST(value AS BIGINT) FROM json_each(:refs))
"""
_ROWS = {
    "call": FEED_CALLS, "reward": FEED_REWARDS, "rollout": FEED_ROLLOUTS, "step": FEED_STEPS, "version": FEED_VERSIONS,
}  # fmt: skip


@router.get("/feed", response_class=StreamingResponse, responses=_EVENTS)  # type: ignore[arg-type]
async def feed(
    request: ControlRequest, cursor: Cursor = None, last_event_id: Annotated[Cursor, Header()] = None
) -> StreamingResponse:
    """Calls, rewards, rollouts, training steps and policy versions as they occur, until the client or the proxy stops.

    The feed continues after `cursor` (an event's `id`), or begins now. If events after the cursor are no longer kept,
    the event `missed` comes first: reload everything. If several events about one record are read together, only the
    last is sent.
    """
    state = request.app.state
    if not hasattr(state, "looks"):  # one for all feeds
        state.looks = Looks(FeedEvents(request.parts.store.database))
    events, given = state.looks.events, cursor if cursor is not None else last_event_id
    newest = await events.newest()  # first: it is what numbers and forgets events in PostgreSQL
    nothing_missed = given is None or await events.knows(given)
    begin = given if given is not None and nothing_missed else newest
    frames = _frames(request, state.looks, begin, nothing_missed)
    return StreamingResponse(frames, headers=_HEADERS, media_type="text/event-stream")


async def _frames(request: ControlRequest, looks: Looks, cursor: int, nothing_missed: bool) -> AsyncIterator[bytes]:
    yield b"id: %d\n\n" % cursor if nothing_missed else b"id: %d\nevent: missed\ndata: {}\n\n" % cursor
    sent_at, keys, headers = monotonic(), request.parts.keys, read_headers(request.scope)
    try:
        while not is_stopping(request.scope):
            happened, cursor = await looks.after(cursor)
            is_quiet, frames = monotonic() > sent_at + QUIET_S, b""
            if happened or is_quiet:
                sees = (await keys.authenticate(headers)).sees  # its key may have been revoked meanwhile
                frames = b"".join(one.frame(sees) for one in happened)
            if frames or is_quiet:
                sent_at = monotonic()
                yield frames or b":\nid: %d\n\n" % cursor
            await asyncio.sleep(LOOK_S)
    except LightningError as error:
        yield b": %s\n\n" % error.message.replace("\n", " ").encode()


@dataclass(frozen=True, slots=True)
class Happened:
    """Event number `n`. `data`: the record's current state. `key_id`: the key that opened the event's rollout."""

    n: int
    kind: Kind
    data: dict[str, Any]
    key_id: str | None

    def frame(self, sees: str | None) -> bytes:
        """Return the event's bytes for a caller who sees only rollouts of the key `sees` (None: all); b"" if hidden."""
        data = self.data
        if sees is not None and self.kind == "step":
            data = data | {"reward": None}
        elif sees is not None and self.kind != "version" and self.key_id != sees:
            return b""
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.n, self.kind.encode(), dumps(data).encode())


class FeedEvents(Feed):
    """The newest 10,000 events, with their records."""

    async def after(self, cursor: int, limit: int) -> tuple[list[Happened], int]:
        """Return the last event of each record among the next `limit` events, and the next cursor."""
        rows = await self._db.all(AFTER, {"cursor": cursor, "limit": limit})
        last = {(row["kind"], str(row["ref"])): row["n"] for row in rows}
        happened = list[Happened]()
        for kind, statement in _ROWS.items():
            refs = [ref for one, ref in last if one == kind]
            for row in await self._db.all(statement, {"refs": dumps(refs)}) if refs else ():
                data = dict(row)
                n, key_id = last[kind, str(data.pop("ref"))], data.pop("key_id", None)
                if kind == "step":
                    data["reward"] = loads_rounded(data.pop("metrics")).get("reward_mean")
                if kind == "version":
                    data |= {"live": bool(data["live"]), "verified": bool(data["verified"])}
                happened.append(Happened(n, kind, data, key_id))  # type: ignore[arg-type]
        return sorted(happened, key=lambda one: one.n), rows[-1]["n"] if rows else cursor


class Looks:
    """Reads events from the store for all feeds of this process, which share the results."""

    def __init__(self, events: FeedEvents) -> None:
        self.events = events
        self._newest, self._looked_at, self._one_at_a_time = 0, 0.0, asyncio.Lock()
        self._read_at, self._read = (-1, -1), (list[Happened](), 0)  # after which cursor, up to which event

    async def after(self, cursor: int) -> tuple[list[Happened], int]:
        """Return the next events after `cursor`, oldest first, and the next cursor."""
        async with self._one_at_a_time:
            if monotonic() > self._looked_at + LOOK_S:
                self._newest, self._looked_at = await self.events.newest(), monotonic()
            if cursor >= self._newest:
                return [], cursor
            if self._read_at != (cursor, self._newest):
                self._read = await self.events.after(cursor, AT_ONCE)
                self._read_at = cursor, self._newest
            return self._read
