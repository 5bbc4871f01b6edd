"""What the data path needs from the rest of the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..access.limits import Limiter
from ..config.upstreams import UpstreamConfig
from ..types import CallEnd, CallStart
from ..upstreams.http import Request
from .asgi import Header


class Route(NamedTuple):
    """Where a call goes, under which model name (None: the agent's), and the policy version (None: not one of ours).

    `fallbacks`: where it goes instead, in this order, if the upstream does not answer it.
    `pins`: the version is what the rollout is answered by from now on; not one that was asked for by its own name.
    """

    upstream: UpstreamConfig
    model: str | None
    version: int | None
    fallbacks: tuple[Route, ...] = ()
    pins: bool = True


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the rollout that the key was given out for; whether the key may go on to a keyless upstream.

    `key_id`: the stored key that it comes down to, if one.
    """

    rollout_id: str | None
    forward_authorization: bool
    limiter: Limiter | None = None
    recorded: bool = True
    key_id: str | None = None


class Answer(Protocol):
    """An upstream's answer that has begun: its status and headers are known."""

    @property
    def status(self) -> int: ...

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of server-sent events."""

    @property
    def retry_after(self) -> str:
        """The header of that name; empty if there is none."""

    def headers(self, *, keep_length: bool) -> list[Header]:
        """The headers for the agent, without Content-Length where the body may change."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamUnreachable if it breaks off, UpstreamTimeout if it stalls."""

    async def read(self) -> bytes:
        """The whole body; raises as `chunks` does."""

    def release(self) -> Any:
        """Let go of it, whole or not."""


class Upstream(Protocol):
    async def open(self, request: Request) -> Answer:
        """Send the request and wait for the answer to begin. Raises UpstreamUnreachable, UpstreamTimeout, Unsupported.

        NoConnection if it did not reach the upstream.
        """

    async def close(self) -> None: ...


# One of `sql.py` with its parameters.
Statement = tuple[str, dict[str, Any]]


class Recorder(Protocol):
    async def start(self, start: CallStart, also: Sequence[Statement] = ()) -> None:
        """Return once the call, and `also` with it, is durable; raise StoreUnavailable otherwise."""

    def end(self, end: CallEnd, also: Sequence[Statement] = ()) -> Awaitable[None]:
        """What it returns is done once the call's end, and `also` with it, is durable, or raises StoreUnavailable."""


class _NoRecorder:
    """For calls that are not recorded."""

    async def start(self, start: CallStart, also: Sequence[Statement] = ()) -> None:
        return

    async def end(self, end: CallEnd, also: Sequence[Statement] = ()) -> None:
        return


NO_RECORDER = _NoRecorder()


class Keys(Protocol):
    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Who calls; raise Unauthorized. Header names are lower-case."""
