"""The proxy as one ASGI app: the data path in raw ASGI, everything else in FastAPI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from .access.auth import require_local
from .config.root import Config
from .config.server import ProxyConfig
from .control import health, policy, rewards, rollouts, status
from .control.parts import open_parts
from .errors import Forbidden, InvalidRequest, LightningError, NotFound, TooLarge, Unprocessable
from .gateway.asgi import Agent, ClientDisconnected, read_headers
from .gateway.relay import is_data_path
from .otel import spans_in
from .otel.telemetry import require_sdk


def create_app(config: Config) -> ASGIApp:
    """The whole proxy; its parts are opened when the server starts and closed when it stops. Raises ConfigError."""
    require_sdk(config.telemetry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_parts(config) as parts:
            app.state.parts = parts
            yield

    control = FastAPI(title="lightning-proxy", version=version("lightning-proxy"), lifespan=lifespan, redoc_url=None)
    for resource in (rewards, rollouts, policy, status, health, spans_in):
        control.include_router(resource.router)
    control.add_exception_handler(LightningError, _lightning_error)
    control.add_exception_handler(RequestValidationError, _invalid)
    control.add_exception_handler(HTTPException, _http_error)
    control.add_exception_handler(Exception, _internal_error)
    return _Dispatch(control, config.proxy)


class _Dispatch:
    """Sends the data path to the relay and the rest, in bodies of limited size, to FastAPI."""

    def __init__(self, control: FastAPI, config: ProxyConfig) -> None:
        self._control = control
        self._max_body = int(config.max_body_mb * 1_000_000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        try:
            if not self._control.state.parts.keys.required:
                require_local(scope["headers"])
        except Forbidden as error:
            await Agent(receive, send).error(error)
            return
        if is_data_path(scope["path"]):
            await self._control.state.parts.relay(scope, receive, send)
        else:
            await self._limited(scope, receive, send)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        agent = Agent(receive, send)
        try:
            body = await agent.read(read_headers(scope), self._max_body)
        except (InvalidRequest, TooLarge) as error:
            await agent.error(error)
        except ClientDisconnected:
            pass
        else:
            await self._control(scope, _replay(body, receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what comes after it."""
    read = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(read, None) or await receive()

    return replay


async def _lightning_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LightningError)
    return JSONResponse(error.body(), error.status)


async def _internal_error(request: Request, _: Exception) -> JSONResponse:
    return await _lightning_error(request, LightningError("internal error of the proxy; its log says more"))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's validation errors in OpenAI's shape: 400 where the body is no JSON at all, else 422."""
    assert isinstance(error, RequestValidationError)
    first = max(error.errors(), key=lambda e: len(e["loc"]))  # the branch of a union that fits best
    where = ".".join(str(part) for part in first["loc"] if part != "body" and "Body" not in str(part))
    if first["type"] == "json_invalid":
        return await _lightning_error(request, InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}"))
    problem = f"{where}: {first['msg']}" if where else _wrong_body(request, error) or first["msg"]
    return await _lightning_error(request, Unprocessable(problem, param=where or None))


def _wrong_body(request: Request, error: RequestValidationError) -> str | None:
    """Of a body that is not read as JSON: FastAPI leaves one as bytes that does not call itself so, as curl's."""
    if isinstance(error.body, bytes):
        called = request.headers.get("content-type", "nothing")
        return f"the body needs the header Content-Type: application/json; this one is called {called}"
    return "a JSON body is needed" if error.body is None else None


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _lightning_error(request, NotFound(f"no route {request.method} {request.url.path}"))
    headers = error.headers
    if error.status_code == 405:
        headers = {"Allow": ", ".join(sorted(_methods(request)))}
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, error.status_code, headers)


def _methods(request: Request) -> set[str]:
    """All that this path answers to; Starlette names those of the first route only."""
    found = (r.methods for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
    return {method for methods in found for method in methods or ()}
