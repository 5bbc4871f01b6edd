"""`GET /feed`: calls, rewards, rollouts, steps and versions as server-sent events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
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
from ...store.database import Database, Feed, Row

router = APIRouter(tags=["page"], route_class=UserRoute)
LOOK_S = 0.25  # from one look at the store to the next
LONGEST_S = 1.0  # until who waits is woken to say that the feed is alive
QUIET_S = 15.0  # after which a comment says that the feed is still there
AT_ONCE = 500  # events that are read and sent at a time
KEPT = 8  # looks, for feeds whose readers are slow
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
_ROWS: dict[str, str] = {
    "call": FEED_CALLS,
    "reward": FEED_REWARDS,
    "rollout": FEED_ROLLOUTS,
    "step": FEED_STEPS,
    "version": FEED_VERSIONS,
}


@router.get("/feed", response_class=StreamingResponse, responses=_EVENTS)  # type: ignore[arg-type]
async def feed(
    request: ControlRequest,
    cursor: Cursor = None,
    last_event_id: Annotated[Cursor, Header()] = None,
) -> StreamingResponse:
    """Calls, rewards, rollouts, training steps and policy versions as they come, until the client or the proxy stops.

    It continues after `cursor`, an event's `id`, or begins now. `missed` comes first if events after the cursor are no
    longer kept: look at everything again. Of events about one thing that come at once, only the last is sent.
    """
    p = request.parts
    looks = _looks(request, p.store.database)
    given = [one for one in (cursor, last_event_id) if one is not None]
    newest = await looks.events.newest()  # first: it is what numbers and forgets events in PostgreSQL
    nothing_missed = not given or await looks.events.knows(given[0])
    frames = _frames(request, looks, given[0] if given and nothing_missed else newest, nothing_missed)
    return StreamingResponse(frames, headers=_HEADERS, media_type="text/event-stream")


def _looks(request: ControlRequest, database: Database) -> Looks:
    """The one look at the store for all feeds."""
    state = request.app.state
    if not hasattr(state, "looks"):
        state.looks = Looks(database)
    looks: Looks = state.looks
    return looks


async def _frames(request: ControlRequest, looks: Looks, cursor: int, nothing_missed: bool) -> AsyncIterator[bytes]:
    yield b"id: %d\n\n" % cursor if nothing_missed else b"id: %d\nevent: missed\ndata: {}\n\n" % cursor
    sent_at, keys, headers = monotonic(), request.parts.keys, read_headers(request.scope)
    try:
        with looks.followed():
            while not is_stopping(request.scope):
                is_quiet, frames = monotonic() > sent_at + QUIET_S, b""
                if looks.cursor > cursor or is_quiet:
                    sees = (await keys.authenticate(headers)).sees  # its key may have been revoked meanwhile
                if looks.cursor > cursor:
                    frames, cursor = await looks.after(cursor, sees)
                if frames or is_quiet:
                    sent_at = monotonic()
                    yield frames or b":\nid: %d\n\n" % cursor
                if looks.cursor <= cursor:
                    await looks.next()
    except LightningError as error:
        yield b": %s\n\n" % error.message.replace("\n", " ").encode()


class _Look:
    """What had happened from one look at the store to the next: the events after `begin`, to `end`."""

    def __init__(self, begin: int, end: int, happened: Sequence[Happened]) -> None:
        self.begin, self.end, self._happened = begin, end, happened
        self._frames: dict[tuple[str | None, int], bytes] = {}

    def frames(self, cursor: int, sees: str | None) -> bytes:
        """Return the events after `cursor`, as those see them who see the rollouts of this key (None: all)."""
        key = sees, max(cursor, self.begin)
        if key not in self._frames:
            seen = (one for one in self._happened if one.n > cursor)
            self._frames[key] = b"".join(_frame(one, sees) for one in seen if _is_seen(one, sees))
        return self._frames[key]


class Looks:
    """Looks at the store for all feeds of this process, while there are any. `cursor`: the newest event that it saw."""

    def __init__(self, database: Database) -> None:
        self.events = FeedEvents(database)
        self.cursor = 0
        self._looks = deque[_Look](maxlen=KEPT)
        self._feeds = 0
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Look at the store during the block."""
        self._feeds += 1
        if self._task is None or self._task.done():
            self._looks.clear()
            self.cursor = 0
            self._task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._feeds -= 1
            if not self._feeds and self._task is not None:
                self._task.cancel()
                self._task = None

    async def next(self) -> None:
        """Return after the next look that saw something, or soon. Raise LightningError if nobody can look."""
        assert self._task is not None
        if not self._task.done():
            await self._woken.wait()
        if self._task.done():
            self._task.result()

    async def after(self, cursor: int, sees: str | None) -> tuple[bytes, int]:
        """Return the events after `cursor`, as `_Look.frames` does, and the cursor after them."""
        for look in self._looks:
            if look.end > cursor >= look.begin:
                return look.frames(cursor, sees), look.end
        happened, end = await self.events.after(cursor, AT_ONCE)  # a feed that begins, or is behind
        return _Look(cursor, end, happened).frames(cursor, sees), end

    async def _look(self) -> None:
        try:
            self.cursor, woken_at = await self.events.newest(), 0.0
            while True:
                begin = self.cursor
                if await self.events.newest() != begin:
                    happened, self.cursor = await self.events.after(begin, AT_ONCE)
                    self._looks.append(_Look(begin, self.cursor, happened))
                if self.cursor != begin or monotonic() > woken_at + LONGEST_S:
                    woken_at = monotonic()
                    self._wake()
                if self.cursor - begin < AT_ONCE:
                    await asyncio.sleep(LOOK_S)
        finally:
            self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()


def _is_seen(one: Happened, sees: str | None) -> bool:
    return sees is None or one.kind in ("step", "version") or one.key_id == sees


def _frame(one: Happened, sees: str | None) -> bytes:
    data = one.data | {"reward": None} if sees is not None and one.kind == "step" else one.data
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (one.n, one.kind.encode(), dumps(data).encode())


@dataclass(frozen=True, slots=True)
class Happened:
    """One event, the `n`th of all. `data` is as it is now: it may have changed again since.

    `key_id`: the key that opened the rollout it is about.
    """

    n: int
    kind: Kind
    data: dict[str, Any]
    key_id: str | None


class FeedEvents(Feed):
    """The newest 10,000 events, with what they are about."""

    async def after(self, cursor: int, limit: int) -> tuple[list[Happened], int]:
        """Return at most `limit` events after `cursor`, oldest first, and the cursor after them.

        Events of deleted records are left out, and all but the last about one record.
        """
        rows = await self._db.all(AFTER, {"cursor": cursor, "limit": limit})
        last = {(row["kind"], str(row["ref"])): row["n"] for row in rows}
        found: list[Happened] = []
        for kind, statement in _ROWS.items():
            if not (refs := [ref for one, ref in last if one == kind]):
                continue
            happened = await self._db.all(statement, {"refs": dumps(refs)})
            found += [_happened(last[kind, str(row["ref"])], kind, row) for row in happened]
        return sorted(found, key=lambda one: one.n), rows[-1]["n"] if rows else cursor


def _happened(n: int, kind: str, row: Row) -> Happened:
    data = {name: value for name, value in dict(row).items() if name not in ("ref", "key_id")}
    if kind == "step":
        data["reward"] = loads_rounded(data.pop("metrics")).get("reward_mean")
    if kind == "version":
        data |= {"live": bool(data["live"]), "verified": bool(data["verified"])}
    return Happened(n, kind, data, dict(row).get("key_id"))  # type: ignore[arg-type]
