"""Requests to the control API: admitted before their body is read, with the proxy's parts, and answered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

from fastapi import Query, Request, Response, Security
from fastapi.params import Depends
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.types import Message, Receive, Scope, Send

from ...core.config.root import Config
from ...core.errors import Forbidden, InvalidRequest
from ...core.http import LARGE, in_thread_if_large
from ...core.json_text import dumps, encoded_parts, loads_in_turns
from ...core.records import check_id
from ...core.redact import Redactor
from ...serving.health import Health, Reach
from ...serving.mode import ModeInUse
from ...serving.swap import Pins, Swap
from ...store.store import Store
from ..access.auth import Caller, Keys, credentials
from ..access.limits import Turns
from ..gateway.asgi import Bodies, ClientDisconnected, Loan, Reply, read_headers
from ..gateway.exact import ExactTokens
from ..gateway.metrics import Metrics
from ..gateway.recorder import Recorder
from ..gateway.relay import Relay
from ..gateway.routing import ModelCheck, PolicyRouter, Watch
from ..hooks import ProxyPlugin

Limit = Annotated[int, Query(ge=1, le=1000)]

# For the OpenAPI document alone: `Keys` reads them, and is asked first.
_ANY = HTTPBearer(
    scheme_name="key",
    description="Any of the proxy's keys. None is needed until the first one is made.",
    auto_error=False,
)
_ANY_AS_HEADER = APIKeyHeader(
    name="x-api-key", scheme_name="key in a header", description="The same keys.", auto_error=False
)
_ADMIN = HTTPBearer(
    scheme_name="admin key",
    description="An admin's key. Where there is none, any key that sees all rollouts.",
    auto_error=False,
)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the proxy that the routes use."""

    config: Config
    mode: ModeInUse
    store: Store
    recorder: Recorder
    swap: Swap | None
    watch: Watch | None
    router: PolicyRouter
    pins: Pins
    keys: Keys
    metrics: Metrics
    redactor: Redactor
    relay: Relay
    bodies: Bodies
    reads: Turns
    exact: ExactTokens | None
    model_check: ModelCheck
    health: Health
    reach: Reach
    plugins: Sequence[ProxyPlugin]
    also_forget: tuple[Callable[[str], None], ...]  # memories of plugins

    def forget(self, rollout_id: str, why: str) -> None:
        """Drop all memory of a rollout that was deleted."""
        self.recorder.forget(rollout_id)
        self.pins.forget(rollout_id)
        if self.exact is not None:
            self.exact.turns.forget(rollout_id)
        for forget in self.also_forget:
            forget(rollout_id)
        self.metrics.deleted.labels(why).inc()


def parts(request: Request) -> Parts:
    """Return the parts of the running proxy."""
    opened: Parts = request.app.state.parts
    return opened


def caller_of(request: Request) -> Caller:
    """Return who sent a request that an `AgentRoute` let in."""
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


class AgentRoute(APIRoute):
    """A route for agents and admins. The handler finds the caller in `request.state.caller`."""

    schemes: ClassVar[tuple[Callable[..., Any], ...]] = (_ANY, _ANY_AS_HEADER)

    def __init__(
        self,
        *args: Any,
        dependencies: Sequence[Depends] | None = None,
        openapi_extra: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        known = {id(one.dependency) for one in dependencies or ()}  # a router that is included makes its routes anew
        added = [Security(one) for one in self.schemes if id(one) not in known]
        none_needed = {**(openapi_extra or {}), "security": [{}]}  # beside the schemes: until the first key is made
        given = [*(dependencies or ()), *added]
        super().__init__(*args, dependencies=given, openapi_extra=none_needed, **named)

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def let_in(request: Request) -> Response:
            p: Parts = request.app.state.parts
            headers = read_headers(request.scope)
            caller = request.state.caller = await p.keys.authenticate(headers)
            self.require(p.keys, caller)
            reads = request.method == "GET"
            with ExitStack() as held:
                held.enter_context(caller.counted(reads=reads))
                loan = request.state.loan = held.enter_context(p.bodies.memory.loan(caller.owner))
                try:
                    body = await p.bodies.read(request.receive, headers, loan) if self.body_field else b""
                except ClientDisconnected:
                    return Response(status_code=400)  # to nobody
                asked = _ReadRequest(request.scope, request.receive, body)
                if not reads:
                    return _UntilSent(await handle(asked), loan, held.pop_all())
                with Reply(request.receive, request._send).while_connected():
                    async with p.reads.turn(caller.owner):
                        response = await handle(asked)
                        if (size := int(response.headers.get("content-length", 0))) >= LARGE:
                            await loan.grow(size)
                        return _UntilSent(response, loan, held.pop_all())
            return Response(status_code=400)  # to nobody

        return let_in

    def require(self, keys: Keys, caller: Caller) -> None:
        """Raise Forbidden or Unauthorized for a caller who has no right to this route."""
        require_may_reward(caller)


class AdminRoute(AgentRoute):
    """A route for admins, and for agents while there is no admin's key."""

    schemes = (_ADMIN,)

    def require(self, keys: Keys, caller: Caller) -> None:
        keys.require_admin(caller)


def require_may_reward(caller: Caller) -> None:
    """Raise Forbidden for the key of a rollout that was opened with `may_reward: false`."""
    if caller.rollout is not None and not caller.rollout.may_reward:
        raise Forbidden("this key may only call the model (may_reward: false)")


class _UntilSent(Response):
    """A response whose request counts until all of it has left, and whose loan gets smaller with each part of it."""

    def __init__(self, response: Response, loan: Loan, held: ExitStack) -> None:
        self._response, self._loan, self._held = response, loan, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_part(message: Message) -> None:
            await send(message)
            self._loan.shrink(len(message.get("body", b"")))

        with self._held:
            await self._response(scope, receive, send_part)


class _ReadRequest(Request):
    """A request whose body was read."""

    def __init__(self, scope: Any, receive: Receive, body: bytes) -> None:
        super().__init__(scope, receive)
        self._read = body

    async def body(self) -> bytes:
        return self._read

    async def json(self) -> Any:
        """Return the body's JSON. NaN and infinities are read, too: the check of the values names the field."""
        return await in_thread_if_large(len(self._read), partial(loads_in_turns, self._read, float))
