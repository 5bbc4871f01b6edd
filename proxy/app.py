"""Builds the proxy as one ASGI app: the data path in raw ASGI, everything else in FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from aiohttp import ClientSession
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.config.root import Config
from ..core.errors import Forbidden, InvalidRequest, LightningError, NotFound, Unprocessable
from ..core.redact import Redactor
from ..core.returns import Rules
from ..serving.health import Health, Reach, check_health
from ..serving.mode import ModeInUse
from ..serving.operator import operator_headers, relay_headers
from ..serving.swap import Pins, Placed, Swap
from ..serving.vllm import VllmFleet, operator_session
from ..store.database import HURRIED
from ..store.opening import opened
from ..store.retention import Keeper
from ..store.rollouts import end_idle_rollouts
from ..store.store import Store
from .access.auth import Keys, require_local
from .access.limits import Turns
from .api import health, policy, rewards, rollouts, status, tasks
from .api.requests import Parts
from .gateway.asgi import Bodies, Reply
from .gateway.attempts import Upstreams
from .gateway.call import Gateway, OnCall
from .gateway.exact import ExactTokens, RecentTurns
from .gateway.metrics import Metrics
from .gateway.recorder import Recorder
from .gateway.relay import Relay, parse_path
from .gateway.routing import ModelCheck, PolicyRouter, Prober, Watch
from .gateway.through_chat import ChatRoute
from .gateway.unnamed import UnnamedRollouts
from .gateway.upstream import make_session
from .hooks import Core, ProxyPlugin, Work
from .plugins.opening import makers_of, open_plugins, plugins_of, with_fields


def create_app(config: Config, heard_by: Sequence[OnCall] = ()) -> ASGIApp:
    """Return the proxy as an app. Its parts open and close with the server. Raise ConfigError.

    `heard_by`: called for each recorded call.
    """
    plugins = plugins_of(config)
    control = control_api(partial(open_parts, config, plugins, heard_by))
    for routers in (CORE, *(plugin.routers for plugin in plugins)):
        add_routes(control, *routers)
    document = partial(rewards.with_range, control.openapi, config.rewards)
    control.openapi = cache(partial(with_fields, document, plugins))  # type: ignore[method-assign]
    return Dispatch(control)


def api_to_read(config: Config, *routers: APIRouter) -> FastAPI:
    """Return the routes that read, and these ones, over a store that is never written."""
    plugins = plugins_of(config)
    control = control_api(partial(open_parts, config, plugins, writes=False))
    core = (module.router for module in (rollouts, tasks, policy, status))
    add_routes(control, *core, *routers, *(one for plugin in plugins for one in plugin.routers))
    control.router.routes[:] = [route for route in control.routes if getattr(route, "methods", {"GET"}) & {"GET"}]
    return control


CORE = tuple(module.router for module in (rewards, rollouts, tasks, policy, status, health))


def add_routes(control: FastAPI, *routers: APIRouter) -> None:
    """Add the routes of each router as they are; `include_router` would make them anew, most of a start's time."""
    for router in routers:
        control.router.routes.extend(router.routes)


def control_api(opened: Callable[[], AbstractAsyncContextManager[Parts]]) -> FastAPI:
    """Return the control API without its routes. The parts that these use are open as long as the server runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened() as parts:
            app.state.parts = parts
            yield

    control = FastAPI(
        title="lightning-proxy", version=version("lightning-proxy"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    control.add_exception_handler(LightningError, _lightning_error)
    control.add_exception_handler(RequestValidationError, _invalid)
    control.add_exception_handler(HTTPException, _http_error)
    control.add_exception_handler(Exception, _internal_error)
    return control


@asynccontextmanager
async def open_parts(
    config: Config, plugins: Sequence[ProxyPlugin] = (), heard_by: Sequence[OnCall] = (), *, writes: bool = True
) -> AsyncIterator[Parts]:
    """Open the proxy's parts, and close them in reverse order at the end. Without `writes`, only read the store."""
    metrics, vouching = Metrics(), _vouching(config)
    redactor = Redactor(config.recording.redact, [*config.keys(), *_own_keys(config)])
    async with AsyncExitStack() as stack:
        # The store, and the connections to upstreams.
        store = Store(await stack.enter_async_context(opened(config.store, to_write=writes)))
        mode = await ModeInUse.of(config, store) if writes else ModeInUse(config, store)
        session = await stack.enter_async_context(make_session())
        upstreams = Upstreams(session, makers=makers_of(plugins), vouching=vouching)
        stack.push_async_callback(upstreams.close)
        operator = await stack.enter_async_context(operator_session())
        # Who may call, how calls are recorded, and which weights answer.
        keys, bodies = Keys(config.proxy, store), Bodies(config.proxy)
        await keys.refresh()
        recorder = await stack.enter_async_context(Recorder(
            store, merged=lambda: mode.mode == "merged", redactor=redactor, on_redacted=metrics.redacted.inc
        ))  # fmt: skip
        to_open, core = plugins if writes else (), Core(config, store, redactor, metrics)
        plugged = await stack.enter_async_context(open_plugins(to_open, core))
        pins = Pins(store, config.policy.pin_timeout_s)
        watch = _watch(config, store, operator, pins, upstreams.health, mode, plugged.placed)
        swap = watch.swap if watch is not None else None
        router = PolicyRouter(config, store, pins, watch, plugged.choose)
        # The data path.
        chat_route = ChatRoute(config.policy, store, upstreams)
        exact = _exact(config, upstreams, store, chat_route, metrics)
        gateway = Gateway(
            config, router, upstreams, recorder, metrics, unnamed=UnnamedRollouts(store), exact=exact,
            chat_route=chat_route, rewrite=plugged.rewrite, listeners=(*plugged.on_call, *heard_by),
        )  # fmt: skip
        # The control API's view of them, and the background work.
        parts = Parts(
            config=config, mode=mode, store=store, recorder=recorder, swap=swap, watch=watch, router=router,
            pins=pins, keys=keys, metrics=metrics, redactor=redactor, bodies=bodies, reads=Turns(), exact=exact,
            relay=Relay(config, keys, gateway, bodies), plugins=plugins,
            model_check=ModelCheck(config, store, swap), health=upstreams.health, reach=Reach(session),
            also_forget=plugged.on_deleted,
        )  # fmt: skip
        if writes:
            await stack.enter_async_context(_at_work(parts, operator, plugged.work))
        yield parts


def _exact(
    config: Config, upstreams: Upstreams, store: Store, chat_route: ChatRoute, metrics: Metrics
) -> ExactTokens | None:
    if config.policy.token_continuity != "exact":
        return None
    return ExactTokens(upstreams, RecentTurns(store, chat_route.chat_of), metrics.continued)


def _vouching(config: Config) -> dict[str, dict[str, str]]:
    """By the upstream's name, the header that tells the policy's vLLM that a request comes through the proxy."""
    upstream = config.policy_upstream
    return {} if upstream is None else {upstream.name: relay_headers(config.policy.directory)}


def _own_keys(config: Config) -> Iterable[str]:
    """The keys that we show to the policy's vLLM."""
    directory = config.policy.directory
    return () if config.policy_upstream is None else (operator_headers(directory) | relay_headers(directory)).values()


def _watch(
    config: Config,
    store: Store,
    session: ClientSession,
    pins: Pins,
    health: Health,
    mode: ModeInUse,
    placed: Placed | None,
) -> Watch | None:
    """The watch over the policy's vLLM; None without an upstream of kind vllm."""
    upstream = config.policy_upstream
    if upstream is None:
        return None
    return Watch(
        Swap(store, VllmFleet.of(config, session), mode.mode, config.policy.directory, placed),
        upstream,
        pins,
        health,
        mode,
    )


def _background(parts: Parts, session: ClientSession) -> list[Coroutine[Any, Any, None]]:
    """The background work of the proxy."""
    work = [parts.keys.watch(), parts.bodies.watch(), check_health(parts.config, session, parts.health)]
    work.append(parts.store.database.look_for_damage())
    work.append(Keeper(parts.store.database, parts.config, parts.forget).run())
    work.append(parts.store.returns.keep())
    work.append(end_idle_rollouts(parts.store.database, parts.config.rollouts))
    if parts.watch is not None:
        work += [parts.watch.run(), Prober(parts.config.policy, parts.watch, parts.health).run()]
    return work


@asynccontextmanager
async def _at_work(parts: Parts, session: ClientSession, plugged: Sequence[Work]) -> AsyncIterator[None]:
    """Run the background work during the block, and cancel it at its end."""
    await parts.store.returns.adopt(Rules.of(parts.config.trainer))
    tasks = [asyncio.create_task(one) for one in (*_background(parts, session), *(work() for work in plugged))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_HURRIED = frozenset({"/reward", "/rollouts", "/readyz", "/metrics"})  # what agents and probes wait for, besides calls


class Dispatch:
    """Sends the data path to the relay (if it `forwards`) and the rest to FastAPI."""

    def __init__(self, control: FastAPI, *, forwards: bool = True) -> None:
        self._control = control
        self._forwards = forwards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        parts: Parts = self._control.state.parts
        try:
            if not parts.keys.required:
                require_local(scope["headers"])
        except Forbidden as error:
            await Reply(receive, send).error(error)
            return
        is_call = self._forwards and parse_path(scope["path"]) is not None
        if is_call or scope["path"] in _HURRIED:
            HURRIED.set(True)  # its statements take no longer than `store.busy_timeout_s`
        if is_call:
            await parts.relay(scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._control({**scope, "method": "GET"}, receive, _only_head(send))
        else:
            await self._control(scope, receive, send)


def _only_head(send: Send) -> Send:
    """Send an answer's head and end there: a stream without end sees that its client has gone."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body"})

    return send_head


async def _lightning_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LightningError)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return JSONResponse(error.body(), error.status, headers)


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
    """All methods of this path; Starlette names those of the first route only."""
    found = (r.methods for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
    methods = {method for methods in found for method in methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods
