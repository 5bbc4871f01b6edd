"""Admits requests to the control API before reading their bodies, gives them the proxy's parts, and sends answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from hashlib import blake2b
from inspect import iscoroutinefunction
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Depends, Header, Request, Response, Security
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.types import Message, Receive, Scope, Send

from ...core.config.root import Config
from ...core.errors import Forbidden
from ...core.http import LARGE, in_thread_if_large
from ...core.json_text import encoded_parts, loads_in_turns
from ...core.records import PublishMode, check_id
from ...core.redact import Redactor
from ...serving.health import Health
from ...serving.swap import Swap
from ...store.store import Store
from ..access.auth import Caller, Keys, credentials
from ..gateway.asgi import Bodies, ClientDisconnected, Loan, Reply, read_headers
from ..gateway.metrics import Metrics
from ..gateway.recorder import Recorder
from ..gateway.relay import Relay
from ..gateway.routing import PolicyRouter, Watch
from ..hooks import OnDeleted, ProxyPlugin
from .bodies import ERRORS

# Only for the OpenAPI document: `Keys` checks the keys, before FastAPI sees the request.
_ANY = "Any of the proxy's keys. None is needed until the first one is made."
_ADMIN = "An admin's key. Without any admin key, any key that sees all rollouts."
_KEYS = [
    Security(HTTPBearer(scheme_name="key", description=_ANY, auto_error=False)),
    Security(APIKeyHeader(name="x-api-key", scheme_name="key in a header", auto_error=False)),
]
_ADMIN_KEYS = [Security(HTTPBearer(scheme_name="admin key", description=_ADMIN, auto_error=False))]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the proxy that the routes use."""

    config: Config
    mode: PublishMode
    store: Store
    recorder: Recorder
    swap: Swap | None
    watch: Watch | None
    router: PolicyRouter
    keys: Keys
    metrics: Metrics
    redactor: Redactor
    relay: Relay | None
    bodies: Bodies
    reads: Mapping[Hashable, asyncio.Semaphore]  # of each key: others wait
    health: Health
    plugins: Sequence[ProxyPlugin]
    on_deleted: Sequence[OnDeleted]

    @property
    def publish(self) -> PublishMode:
        """Return the publishing mode in which versions are served."""
        return self.mode if self.swap is None else self.swap.mode

    def forget(self, rollout_id: str, why: str) -> None:
        """Drop a deleted rollout from memory, and count it."""
        for forget in self.on_deleted:
            forget(rollout_id)
        self.metrics.deleted.labels(why).inc()


class ControlRequest(Request):
    """A request from a caller that an `AgentRoute` let in. Its body has been read."""

    def __init__(self, request: Request, parts: Parts, caller: Caller, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self.parts, self.caller, self._read = parts, caller, body

    async def body(self) -> bytes:
        return self._read

    async def json(self) -> Any:
        """Return the body's JSON. NaN and infinities are read, too, so that a later error can name their field."""
        return await in_thread_if_large(len(self._read), partial(loads_in_turns, self._read, float))


def _own_key(request: Request, idempotency_key: Annotated[str | None, Header(max_length=200)] = None) -> str | None:
    sender = credentials(request.headers)
    if idempotency_key is None or not sender.strip():
        return idempotency_key
    return f"{blake2b(sender.encode(), digest_size=16).hexdigest()} {idempotency_key}"


# The header `Idempotency-Key`, made unique to its sender: another API key may use the same one.
OwnKey = Annotated[str | None, Depends(_own_key)]


async def json_response(value: Any) -> Response:
    """Return a JSON response, encoded in a thread. Raises TypeError if a value cannot be encoded.

    The response is sent in parts, and each part is freed once it has been sent.
    """
    parts = await asyncio.to_thread(lambda: deque(encoded_parts(value)))

    async def each() -> AsyncIterator[bytes]:
        while parts:
            yield parts.popleft()

    length = {"content-length": str(sum(map(len, parts)))}
    return StreamingResponse(each(), headers=length, media_type="application/json")


class AgentRoute(APIRoute):
    """A route for any key, even a rollout's own if that may reward. A rollout in the path must be visible to the key.

    The handler may take a `ControlRequest`. What the handler returns, records included, is encoded unchanged; the
    response model is only for the OpenAPI document.
    """

    lets_in: ClassVar[Literal["agents", "users", "admins"]] = "agents"

    def __init__(self, path: str, endpoint: Callable[..., Coroutine[Any, Any, Any]], **options: Any) -> None:
        @wraps(endpoint)
        async def answer(**values: Any) -> Any:
            made = await endpoint(**values)
            if made is None or isinstance(made, Response):
                return made
            try:
                return await json_response(made)
            except TypeError:  # FastAPI can encode more types
                return made

        options["dependencies"] = options["dependencies"] + (_ADMIN_KEYS if self.lets_in == "admins" else _KEYS)
        options["responses"] = ERRORS | options["responses"]
        # No key is needed until the first one is made.
        options["openapi_extra"] = (options["openapi_extra"] or {}) | {"security": [{}]}
        super().__init__(path, answer if iscoroutinefunction(endpoint) else endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def let_in(request: Request) -> Response:
            p: Parts = request.app.state.parts
            headers = read_headers(request.scope)
            caller = await p.keys.authenticate(headers)
            reads = request.method == "GET"
            with ExitStack() as held:
                held.enter_context(caller.counted(reads=reads))
                loan = held.enter_context(p.bodies.memory.loan(caller.owner))
                if self.lets_in == "admins":
                    p.keys.require_admin(caller)
                require_may_reward(caller)
                if (rollout_id := request.path_params.get("rollout_id")) is not None:
                    await p.keys.require(caller, [check_id(rollout_id, "rollout_id")])
                elif self.lets_in == "users":
                    await p.keys.require(caller, [])
                try:
                    body = await p.bodies.read(request.receive, headers, loan) if self.body_field else b""
                except ClientDisconnected:
                    return Response(status_code=400)  # the client has left
                admitted = ControlRequest(request, p, caller, body)
                if not reads:
                    return _UntilSent(await handle(admitted), loan, held.pop_all())
                with Reply(request.receive, request._send).while_connected():
                    async with p.reads[caller.owner]:
                        response = await handle(admitted)
                        if (size := int(response.headers.get("content-length", 0))) >= LARGE:
                            await loan.grow(size)
                        return _UntilSent(response, loan, held.pop_all())
            return Response(status_code=400)  # the client has left

        return let_in


class UserRoute(AgentRoute):
    """A route that accepts a rollout's own key only if the path names that rollout."""

    lets_in = "users"


class AdminRoute(AgentRoute):
    """A route for admins and, while there is no admin key, for keys that see all rollouts."""

    lets_in = "admins"


def require_may_reward(caller: Caller) -> None:
    """Raise Forbidden for the key of a rollout that was opened with `may_reward: false`."""
    if caller.rollout is not None and not caller.rollout.may_reward:
        raise Forbidden("this key may only call the model (may_reward: false)")


class _UntilSent(Response):
    """A response whose request counts as running until all parts are sent. The memory loan shrinks with each part."""

    def __init__(self, response: Response, loan: Loan, held: ExitStack) -> None:
        self._response, self._loan, self._held = response, loan, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_part(message: Message) -> None:
            await send(message)
            self._loan.shrink(len(message.get("body", b"")))

        with self._held:
            await self._response(scope, receive, send_part)
