"""Defines an upstream: the destination of a call, the request sent to it, and the answer that comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Protocol

from ...core.config.upstreams import UpstreamConfig
from ...core.errors import UpstreamTimeout, UpstreamUnreachable
from ...core.http import LARGE
from ...core.records import Header

Piece = bytes | memoryview


class Route(NamedTuple):
    """Says where a call goes: upstream, model name (None: the agent's) and policy version (None: not ours).

    `fallbacks`: where it goes instead, in this order, if the upstream does not answer it.
    `pins`: the rollout keeps this version; False where the agent asked for the version by its own name.
    `adds_usage`: the upstream's streams have a usage chunk whether or not one asks for it.
    `servers`: the URLs of the only servers that may answer; empty if all may.
    """

    upstream: UpstreamConfig
    model: str | None
    version: int | None
    fallbacks: tuple[Route, ...] = ()
    pins: bool = True
    adds_usage: bool = False
    servers: tuple[str, ...] = ()


class Request(NamedTuple):
    """A request as it goes upstream.

    `path`: percent-encoded, from /v1/ on. `headers`: the agent's. `identity`: the answer is to come uncompressed.
    `rollout_id`: requests with the same one go to the same replica. `pieces`: what is sent in place of `body` where
    that is large and hardly changed, so that it is not copied. `servers`: as those of `Route`. `sent` is called when a
    large body was sent.
    """

    method: str
    path: str
    query: bytes
    headers: list[Header]
    body: bytes
    forward_authorization: bool
    identity: bool = False
    rollout_id: str = ""
    pieces: tuple[Piece, ...] = ()
    servers: tuple[str, ...] = ()
    sent: Callable[[], None] | None = None

    def with_body(self, *pieces: Piece) -> Request:
        """Return the request with these pieces for its body, which are joined if they are small."""
        if len(pieces) == 1 and isinstance(pieces[0], bytes):
            return self._replace(body=pieces[0], pieces=())
        if sum(map(len, pieces)) < LARGE:
            return self._replace(body=b"".join(pieces), pieces=())
        return self._replace(pieces=pieces)

    def with_members(self, members: bytes) -> Request:
        """Return the request with the members of a JSON object at the end of its own, which has some."""
        *before, last = self.pieces or (self.body.rstrip(),)
        return self.with_body(*before, memoryview(last)[:-1], b"," + members[1:])

    def sent_body(self) -> bytes:
        """Return the bytes that are sent."""
        return b"".join(self.pieces) if self.pieces else self.body


class Answer(Protocol):
    """An upstream's answer that has begun: its status and headers are known."""

    @property
    def status(self) -> int: ...

    @property
    def is_stream(self) -> bool:
        """Return whether the answer is a stream of server-sent events."""

    @property
    def retry_after(self) -> str:
        """Return the Retry-After header; empty if there is none."""

    def headers(self, *, keep_length: bool) -> list[Header]:
        """Return the headers for the agent, without Content-Length if the body may change or was decoded."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raise UpstreamUnreachable if it breaks off, UpstreamTimeout if it stalls."""

    async def read(self) -> bytes:
        """Return the entire body. Errors are those of `chunks`."""

    def release(self) -> Any:
        """Release the answer's connection, even if the body was not read to its end."""


class ReadAnswer:
    """An answer whose entire body was read already."""

    def __init__(self, answer: Answer, body: bytes) -> None:
        self._answer = answer
        self._body = body
        self.status = answer.status
        self.is_stream = answer.is_stream
        self.retry_after = answer.retry_after
        self.headers = answer.headers
        self.release = answer.release

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def read(self) -> bytes:
        return self._body


class Upstream(Protocol):
    """One configured upstream in use."""

    async def open(self, request: Request) -> Answer:
        """Send the request and wait for the answer to begin. Raises UpstreamUnreachable, UpstreamTimeout, Unsupported.

        NoConnection if it did not reach the upstream.
        """

    async def close(self) -> None: ...


class NoConnection(UpstreamUnreachable):
    """The request did not reach the upstream."""


class NoConnectionInTime(UpstreamTimeout, NoConnection):
    """The upstream did not accept a connection in time."""


class KeyMask:
    """Masks the upstream's own keys in one answer: some upstreams name it when they refuse it, or echo headers.

    As many asterisks stand in the place of a key, so that lengths stay true.
    """

    def __init__(self, *keys: str) -> None:
        self._keys = [key.encode() for key in keys]
        self._held = b""

    def once(self, data: bytes) -> bytes:
        """Mask the key in data that is complete."""
        for key in self._keys:
            data = data.replace(key, b"*" * len(key))
        return data

    def feed(self, data: bytes) -> bytes:
        """Return the next piece of a body, without an end that may be the beginning of the key."""
        data = self.once(self._held + data)
        size = max((_begun(key, data) for key in self._keys), default=0)
        self._held = data[len(data) - size :]
        return data[: len(data) - size]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held


def _begun(key: bytes, data: bytes) -> int:
    """How many bytes at the end of the data may be the beginning of the key."""
    return next((n for n in range(min(len(key) - 1, len(data)), 0, -1) if data.endswith(key[:n])), 0)
