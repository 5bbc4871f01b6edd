"""Admits requests to the control API: checks the key and its limits before the body is read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

from fastapi import Request, Response, Security
from fastapi.params import Depends
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.types import Message, Receive, Scope, Send

from ...core.errors import Forbidden
from ...core.http import LARGE, in_thread_if_large
from ...core.json_text import loads_in_turns
from ..access.auth import Caller, Keys
from ..gateway.asgi import ClientDisconnected, Loan, Reply, read_headers
from .parts import Parts

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
