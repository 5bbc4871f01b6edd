"""Builds the proxy as one ASGI app: the data path in raw ASGI, everything else in FastAPI."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

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
from ..serving.mode import decide, publish_mode
from ..serving.operator import operator_headers, relay_headers
from ..serving.swap import Swap
from ..serving.vllm import VllmFleet, operator_session
from ..store.database import HURRIED
from ..store.opening import opened
from ..store.retention import Keeper
from ..store.rollouts import end_idle_rollouts
from ..store.store import Store
from .access.auth import Keys, require_local
from .api import policy, rollouts, status
from .api.requests import Parts
from .gateway.asgi import Bodies, Reply
from .gateway.attempts import Upstreams
from .gateway.call import Gateway, OnCall
from .gateway.exact import ExactTokens
from .gateway.metrics import Metrics
from .gateway.recorder import Recorder
from .gateway.relay import Relay, parse_path
from .gateway.routing import PolicyRouter, Watch
from .gateway.through_chat import ChatRoute
from .gateway.unnamed import UnnamedRollouts
from .gateway.upstream import make_session
from .hooks import Core, Hooks, ProxyPlugin
from .plugins import add_fields, makers_of, plugins_of

READS = 2  # of one key that are answered at once
CORE = (
    rollouts.rewards, rollouts.router, rollouts.admins, rollouts.tasks, policy.router, policy.admins, status.router,
)  # fmt: skip


def create_app(config: Config, heard_by: Sequence[OnCall] = ()) -> ASGIApp:
    """Return the proxy as an app that reports ended calls to `heard_by`. Raises ConfigError if a plugin cannot run."""
    plugins = plugins_of(config)
    control = _control_api(config, plugins, (*CORE, status.health), heard_by)
    described = control.openapi

    @cache
    def openapi() -> dict[str, Any]:
        document, (low, high) = described(), config.rewards.range
        schemas = document["components"]["schemas"]
        schemas["RewardBody"]["properties"]["reward"].update(minimum=low, maximum=high)
        add_fields(schemas, plugins)
        return document

    control.openapi = openapi  # type: ignore[method-assign]
    return Dispatch(control)


def api_to_read(config: Config, *routers: APIRouter) -> FastAPI:
    """Return an app that only reads the store. It has the GET routes of the control API and of `routers`."""
    control = _control_api(config, plugins_of(config), (*CORE, *routers), writes=False)
    control.router.routes[:] = [route for route in control.routes if getattr(route, "methods", {"GET"}) & {"GET"}]
    return control


def _control_api(
    config: Config,
    plugins: Sequence[ProxyPlugin],
    routers: Sequence[APIRouter],
    heard_by: Sequence[OnCall] = (),
    *,
    writes: bool = True,
) -> FastAPI:
    """The control API. The parts that its routes use stay open while the server runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _opened(config, plugins, heard_by, writes=writes) as app.state.parts:
            yield

    control = FastAPI(
        title="lightning-proxy", version=version("lightning-proxy"), lifespan=lifespan, docs_url=None, redoc_url=None,
        exception_handlers=dict.fromkeys((LightningError, RequestValidationError, HTTPException, Exception), _refused),
    )  # fmt: skip
    # Unchanged: `include_router` would build them again, which takes most of a start's time.
    for router in (*routers, *(router for plugin in plugins for router in plugin.routers)):
        control.router.routes.extend(router.routes)
    return control


@asynccontextmanager
async def _opened(
    config: Config, plugins: Sequence[ProxyPlugin], heard_by: Sequence[OnCall], *, writes: bool
) -> AsyncIterator[Parts]:
    """Open the proxy's parts, and close them when the block ends. Without `writes`, nothing is written to the store."""
    metrics, vllm, directory = Metrics(), config.policy_upstream, config.policy.directory
    async with AsyncExitStack() as stack:
        # The store, and the connections to upstreams.
        store = Store(await stack.enter_async_context(opened(config.store, to_write=writes)))
        # With these keys the policy's vLLM knows the operator, and requests that come through the proxy. They are made
        # on first use, and whoever only reads the store asks no server.
        asks = vllm is not None and writes
        relayed, operators = (relay_headers(directory), operator_headers(directory)) if asks else ({}, {})
        redactor = Redactor(config.recording.redact, [*config.keys(), *relayed.values(), *operators.values()])
        if writes and config.policy.publish != "auto":
            await decide(config, store, "proxy")
        mode, session = publish_mode(config), await stack.enter_async_context(make_session())
        vouching = {} if vllm is None else {vllm.name: relayed}
        upstreams = Upstreams(session, makers=makers_of(plugins), vouching=vouching)
        stack.push_async_callback(upstreams.close)
        operator = await stack.enter_async_context(operator_session())
        # Who may call, how calls are recorded, and which weights answer.
        keys, bodies = Keys(config.proxy, store), Bodies(config.proxy)
        await keys.refresh()
        recorder = await stack.enter_async_context(Recorder(
            store, merged=lambda: swap is not None and swap.mode == "merged", redactor=redactor,
            on_redacted=metrics.redacted.inc,
        ))  # fmt: skip
        core, to_open = Core(config, store, redactor, metrics), plugins if writes else ()
        hooks = [await stack.enter_async_context(plugin.opened(core)) for plugin in to_open]

        def of_hooks(name: str) -> list[Any]:
            return [hook for one in hooks if (hook := getattr(one, name)) is not None]

        choose, placed = next(iter(of_hooks("choose")), None), next(iter(of_hooks("placed")), None)
        fleet = VllmFleet.of(config, operator) if asks else VllmFleet(operator, ())
        swap = None if vllm is None else Swap(store, fleet, mode, directory, placed)
        watch = None if vllm is None or swap is None else Watch(config.policy, swap, vllm, upstreams.health)
        router = PolicyRouter(config, store, watch, choose)
        # The data path.
        chat_route, exact = ChatRoute(config.policy, store, upstreams), None
        if config.policy.token_continuity == "exact":
            exact = ExactTokens(upstreams, chat_route.history, lambda outcome: metrics.continuity.labels(outcome).inc())
        gateway = Gateway(
            config, router, upstreams, recorder, metrics, unnamed=UnnamedRollouts(store), exact=exact,
            chat_route=chat_route, rewrites=of_hooks("rewrite"), listeners=[*of_hooks("on_call"), *heard_by],
        )  # fmt: skip
        # The control API's view of them, and the background work.
        relay = Relay(config, keys, gateway, bodies) if writes else None
        parts = Parts(
            config=config, mode=mode, store=store, recorder=recorder, swap=swap, watch=watch, router=router, keys=keys,
            metrics=metrics, redactor=redactor, relay=relay, bodies=bodies,
            reads=defaultdict(lambda: asyncio.Semaphore(READS)), health=upstreams.health, plugins=plugins,
            on_deleted=[recorder.forget, chat_route.history.forget, *of_hooks("on_deleted")],
        )  # fmt: skip
        if writes:
            await store.rewards.adopt(Rules.of(config.trainer))
            await stack.enter_async_context(_at_work(parts, hooks))
        yield parts


@asynccontextmanager
async def _at_work(parts: Parts, hooks: Sequence[Hooks]) -> AsyncIterator[None]:
    config, database = parts.config, parts.store.database
    work = [parts.keys.watch(), parts.health.watch(config)]
    work += [Keeper(database, config, parts.forget).run(), end_idle_rollouts(database, config.rollouts)]
    work += [database.look_for_damage(), parts.store.rewards.keep()]
    if parts.watch is not None:
        work += [parts.watch.run(), parts.watch.ask_again()]
    tasks = [asyncio.create_task(one) for one in (*work, *(run() for one in hooks for run in one.work))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_HURRIED = frozenset({"/reward", "/rollouts", "/readyz", "/metrics"})  # what agents and probes wait for, besides calls


class Dispatch:
    """Sends requests to the relay or FastAPI. While no key is needed, refuses what a foreign web page could send."""

    def __init__(self, control: FastAPI) -> None:
        self._control = control

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
        relay, path = parts.relay, parse_path(scope["path"])
        if path is not None or scope["path"] in _HURRIED:
            HURRIED.set(True)  # its statements take no longer than `store.busy_timeout_s`
        if relay is not None and path is not None:
            await relay(scope, receive, send, path)
        elif scope["method"] == "HEAD":

            async def only_head(message: Message) -> None:
                if message["type"] == "http.response.start":  # a stream without end sees that its client has gone
                    await send(message)
                    await send({"type": "http.response.body"})

            await self._control({**scope, "method": "GET"}, receive, only_head)
        else:
            await self._control(scope, receive, send)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    refusal = LightningError("internal error of the proxy; see its log")
    match error:
        case LightningError():
            refusal = error
        case RequestValidationError():
            first = max(error.errors(), key=lambda e: len(e["loc"]))  # the branch of a union that fits best
            where = ".".join(str(part) for part in first["loc"] if part != "body" and "Body" not in str(part))
            refusal = Unprocessable(f"{where}: {first['msg']}" if where else first["msg"], param=where or None)
            if first["type"] == "json_invalid":
                refusal = InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}")
            elif not where and error.body is None:
                refusal = Unprocessable("a JSON body is needed")
            elif not where and isinstance(error.body, bytes):  # so FastAPI leaves it, for example curl's
                kind = request.headers.get("content-type", "nothing")
                problem = f"the body needs the header Content-Type: application/json; got {kind}"
                refusal = Unprocessable(problem)
        case HTTPException(status_code=404):
            refusal = NotFound(f"no route {request.method} {request.url.path}")
        case HTTPException():
            refusal = InvalidRequest(error.detail)
            refusal.status = error.status_code
    headers = {name.decode(): value.decode() for name, value in refusal.headers}
    if refusal.status == 405:  # Starlette names the methods of the first route of this path only
        found = (r.methods for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
        methods = {method for methods in found for method in methods or ()}
        headers["Allow"] = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
    return JSONResponse(refusal.body(), refusal.status, headers)
