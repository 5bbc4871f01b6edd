"""The data path: /v1/… and /rollouts/{id}/…/v1/… as a raw ASGI app. Contract, section 1."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import orjson

from ..access.limits import Limiter
from ..apis.dialects import DIALECTS, Dialect
from ..apis.inject import Injection
from ..config.root import Config
from ..conversation.exact import ExactTokens
from ..conversation.unnamed import Remembering, UnnamedRollouts, caller_id
from ..errors import Forbidden, InvalidRequest, LightningError, MethodNotAllowed, NotFound
from ..json_text import as_utf8, encode, loads, with_model
from ..otel.telemetry import Telemetry
from ..policy.routing import PolicyRouter
from ..types import CallEnd, CallStart, RolloutName
from ..upstreams.attempts import Attempts, Target, Upstreams
from ..upstreams.http import Request
from .asgi import Agent, ClientDisconnected, Receive, Scope, Send, read_headers, unpack
from .call import Exchange
from .forms import form_model, is_form, with_form_model
from .naming import DataPath, name_rollout, parse_path, wants_recording
from .ports import NO_RECORDER, Caller, Keys, Recorder, Route

log = logging.getLogger(__name__)

_VERSION = b"x-policy-version"
# Not TRACE: its answer is the request, with what we add to it.
_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
_NOBODY = Caller(None, forward_authorization=False)
_RESPONSES = "/v1/responses/"
_OPERATOR_ROUTES = frozenset({"load_lora_adapter", "unload_lora_adapter"})
# What a server behind us might resolve to another path than the one that was checked.
_AMBIGUOUS = re.compile(r"\.\.|//|/\.(?:/|$)|[\\\x00-\x1f\x7f]")


def is_data_path(path: str) -> bool:
    """Whether a request for this (percent-decoded) path is the data path's; all others are the control API's."""
    return parse_path(path) is not None


class Relay:
    """Forwards every data request, and records those that are model calls."""

    def __init__(
        self,
        config: Config,
        upstreams: Upstreams,
        recorder: Recorder,
        policy: PolicyRouter,
        keys: Keys,
        on_end: Callable[[CallEnd, bool], None] | None = None,
        continuity: ExactTokens | None = None,
        conversations: UnnamedRollouts | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """`on_end` hears of every call that has ended, and whether it was recorded."""
        self._telemetry = telemetry
        self._upstreams = upstreams
        self._recorder = recorder
        self._policy = policy
        self._named = {upstream.name: upstream for upstream in config.upstreams}
        self._keys = keys
        self._conversations = conversations
        self._max_body_bytes = int(config.proxy.max_body_mb * 1_000_000)
        self._finish = config.recording.on_disconnect == "finish"
        self._on_end = on_end
        self._continuity = continuity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = parse_path(scope["path"]) or DataPath("")
        dialect = DIALECTS.get(path.rest)
        agent = Agent(receive, send, dialect.error_body if dialect else LightningError.body)
        try:
            await self._handle(scope, path, agent)
        except ClientDisconnected:
            return
        except LightningError as error:
            await _show(agent, error)
        except RecursionError:
            await _show(agent, InvalidRequest("the request body is nested too deeply"))
        except Exception:
            log.exception("%s %s: internal error", scope["method"], scope["path"])
            await _show(agent, LightningError("internal error of the proxy; its log says more"))

    async def _handle(self, scope: Scope, path: DataPath, agent: Agent) -> None:
        if not path.rest or not _is_allowed(path.rest):
            raise NotFound(f"no such route: {scope['method']} {scope['path']}")
        if scope["method"] not in _METHODS:
            raise MethodNotAllowed(f"{scope['method']} is not passed on")
        headers = read_headers(scope)
        caller = _NOBODY if _is_preflight(scope, headers) else await self._keys.authenticate(headers)
        rollout = name_rollout(path, headers, caller.rollout_id)
        if caller.rollout_id not in (None, rollout.rollout_id):
            raise Forbidden(f"this key is for rollout {caller.rollout_id!r} only")
        if caller.limiter is None:
            await self._forward(scope, path, agent, headers, caller, rollout)
            return
        caller.limiter.enter()
        try:
            await self._forward(scope, path, agent, headers, caller, rollout)
        finally:
            caller.limiter.leave()

    async def _forward(
        self, scope: Scope, path: DataPath, agent: Agent, headers: dict[str, str], caller: Caller, rollout: RolloutName
    ) -> None:
        body = await agent.read(headers, self._max_body_bytes)
        dialect = DIALECTS.get(path.rest) if scope["method"] == "POST" else None
        if dialect is not None:
            if "content-encoding" in headers and not body.startswith(b"{"):  # some say it of what is no such thing
                body = unpack(body, headers["content-encoding"], self._max_body_bytes)
                scope = {**scope, "headers": [h for h in scope["headers"] if h[0] != b"content-encoding"]}
            body = as_utf8(body)
            request = _request(scope, path.rest, body, caller, identity=True)
            recorder = self._recorder if wants_recording(headers) and caller.recorded else None
            await self._call(agent, request, dialect, rollout, headers, caller.limiter, recorder)
        elif scope["method"] == "GET" and path.rest == "/v1/models":
            await self._list_models(agent, _request(scope, path.rest, body, caller, identity=True), rollout)
        elif scope["method"] == "GET" and path.rest == f"/v1/models/{self._policy.alias}":
            await agent.json(200, self._policy.alias_entry())
        else:
            await self._pass(agent, _request(scope, path.rest, body, caller), rollout, headers)

    async def _call(
        self,
        agent: Agent,
        request: Request,
        dialect: Dialect,
        rollout: RolloutName,
        headers: dict[str, str],
        limiter: Limiter | None,
        recorder: Recorder | None,
    ) -> None:
        """A model call; without a recorder nothing of it is kept."""
        body, scope, is_retry = _parse_object(request.body), caller_id(headers), _is_retry(headers)
        conversations = self._conversations if recorder is not None and not rollout.named else None
        if conversations is not None:
            found = await conversations.find(scope, body, rollout, is_retry=is_retry)
            rollout = rollout if found is None else rollout._replace(rollout_id=found)
        route = await self._policy.route(rollout, _model(body))
        attempts = self._attempts(agent, request, body, rollout, route, dialect)
        start = CallStart(
            call_id=_new_call_id(),
            rollout=rollout,
            endpoint=request.path.removeprefix("/v1/"),
            model=attempts.target.model,
            policy_version=route.version,
            request=body,
            started_at=time.time(),
            is_retry=is_retry,
            request_text=request.body.decode(),
            upstream=route.upstream.name,
            pins=route.pins,
        )
        if recorder is not None:
            agent.extra += [(b"x-rollout-id", rollout.rollout_id.encode()), (b"x-call-id", start.call_id.encode())]
        if route.version is not None:
            agent.extra.append((_VERSION, str(route.version).encode()))
        continuity = self._continuity if recorder is not None else None
        continued = continuity and continuity.call(route.upstream, start, attempts.target.sent)
        if continued:
            attempts.begin_with(continued.open)
        recorded = recorder is not None
        if recorder is not None and conversations is not None:
            recorder = Remembering(recorder, scope, start)

        def on_end(end: CallEnd) -> None:
            if limiter is not None:
                limiter.spend(end, len(request.body))
            if continued:
                continued.ended(end)
            if self._on_end is not None:
                self._on_end(end, recorded)
            if self._telemetry is not None and recorded:
                self._telemetry.call_ended(start, end, headers)

        exchange = Exchange(attempts, recorder or NO_RECORDER, agent, start, dialect, on_end)
        await agent.run_while_connected(exchange.run(), finish=self._finish and recorded)

    def _attempts(
        self,
        agent: Agent,
        request: Request,
        body: dict[str, Any],
        rollout: RolloutName,
        route: Route,
        dialect: Dialect | None = None,
    ) -> Attempts:
        """The ways to an answer; what an upstream is sent is made when its turn has come."""
        request = request._replace(rollout_id=rollout.rollout_id)

        def routes() -> Iterator[Route]:
            yield route
            for fallback in route.fallbacks:
                agent.extra = [header for header in agent.extra if header[0] != _VERSION]
                yield fallback

        def ask(route: Route, plain: bool) -> Target:
            return _target(request, body, route, None if plain else dialect)

        return Attempts(self._upstreams, routes(), ask)

    def forget(self, rollout_id: str) -> None:
        """The rollout was deleted."""
        if self._continuity is not None:
            self._continuity.forget(rollout_id)

    async def _list_models(self, agent: Agent, request: Request, rollout: RolloutName) -> None:
        """The upstream's list and the alias; an answer that is no list goes through as it is."""
        route = await self._policy.route(rollout, None)
        answer = await self._upstreams.open(route.upstream, request)
        try:
            raw = await answer.read()
        finally:
            answer.release()
        if answer.status == 200:
            raw = self._with_alias(raw)
        await agent.answer(answer.status, answer.headers(keep_length=False), raw)

    def _with_alias(self, raw: bytes) -> bytes:
        try:
            models = orjson.loads(raw)
            models["data"].append(self._policy.alias_entry())
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
            return raw
        return orjson.dumps(models)

    async def _pass(self, agent: Agent, request: Request, rollout: RolloutName, headers: dict[str, str]) -> None:
        """Forward unrecorded; a model named in a JSON body or a form is routed like that of a recorded call."""
        body = form_model(request.body) if is_form(request.body) else _try_object(request.body)
        found = await self._of_response(request, rollout, headers)
        rollout, route = found or (rollout, await self._policy.route(rollout, _model(body)))
        attempts = self._attempts(agent, request, body, rollout, route)
        await agent.run_while_connected(self._stream_through(agent, attempts))

    async def _of_response(
        self, request: Request, rollout: RolloutName, headers: dict[str, str]
    ) -> tuple[RolloutName, Route] | None:
        """Where the response that is asked for again is kept, by its id; None for any other request."""
        if self._conversations is None or not request.path.startswith(_RESPONSES):
            return None
        response_id = request.path.removeprefix(_RESPONSES).partition("/")[0]
        rollout_id, name = await self._conversations.giver(caller_id(headers), rollout, response_id) or (None, None)
        if rollout_id is None or name not in self._named:
            return None
        return rollout._replace(rollout_id=rollout_id), Route(self._named[name], None, None)

    async def _stream_through(self, agent: Agent, attempts: Attempts) -> None:
        answer = await attempts.open()
        try:
            await agent.start(answer.status, answer.headers(keep_length=True))
            async for data in answer.chunks():
                await agent.body(data)
            await agent.body(b"", more=False)
        finally:
            answer.release()


async def _show(agent: Agent, error: LightningError) -> None:
    """An error; where the answer has begun it is left unfinished: the server then closes the connection."""
    if agent.started:
        log.warning("answer broken off: %s", error.message)
    else:
        await agent.error(error)


def _is_allowed(path: str) -> bool:
    """Not for operator routes, however a server behind us may come to read them: decoding again, without `;…`."""
    if path in DIALECTS:
        return True
    for _ in range(3):
        if _AMBIGUOUS.search(path) or not _OPERATOR_ROUTES.isdisjoint(_names(path)):
            return False
        path, before = unquote(path), path
        if path == before:
            return True
    return False


def _names(path: str) -> list[str]:
    return [part.strip() for part in re.split("[/;]", path.lower())]


def _request(scope: Scope, path: str, body: bytes, caller: Caller, *, identity: bool = False) -> Request:
    return Request(
        method=scope["method"],
        path=path,
        query=scope["query_string"],
        headers=list(scope["headers"]),
        body=body,
        forward_authorization=caller.forward_authorization,
        identity=identity,
    )


def _is_preflight(scope: Scope, headers: dict[str, str]) -> bool:
    """What a browser asks before it sends a key: the upstream says whom it lets ask. https://fetch.spec.whatwg.org"""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _is_retry(headers: dict[str, str]) -> bool:
    """OpenAI's clients count the retries that they make by themselves."""
    return headers.get("x-stainless-retry-count", "0") != "0"


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        value = loads(body)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return value


def _try_object(body: bytes) -> dict[str, Any]:
    try:
        body = as_utf8(body)
        return _parse_object(body) if body.lstrip().startswith(b"{") else {}
    except InvalidRequest:
        return {}


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _target(request: Request, body: dict[str, Any], route: Route, dialect: Dialect | None) -> Target:
    """How this upstream is asked: with the dialect's additions if there is one and the upstream is vLLM."""
    sent, injection = _with_model(body, route), Injection()
    if dialect is not None and route.upstream.kind == "vllm":
        sent, injection = dialect.inject(sent)
    return Target(route, _with_body(request, body, sent), sent, injection)


def _with_model(body: dict[str, Any], route: Route) -> dict[str, Any]:
    """A model of the wrong type is left for the upstream to refuse."""
    if route.model is None or not isinstance(body.get("model"), str | None):
        return body
    return body | {"model": route.model}


def _with_body(request: Request, body: dict[str, Any], sent: dict[str, Any]) -> Request:
    """The request with `sent` for its body: the agent's own bytes where it can be, what was added at their end.

    So numbers keep their digits, and what a parser would lose is not lost.
    """
    changed = {name: value for name, value in sent.items() if name not in body or body[name] is not value}
    if not changed:
        return request
    if is_form(request.body):
        return request.with_body(with_form_model(request.body, sent["model"]))
    text: bytes | None = request.body
    if "model" in changed and "model" in body:
        text = with_model(request.body, changed.pop("model"))
    if text is None or not body or any(name in body for name in changed):
        return request.with_body(encode(sent))
    if not changed:
        return request.with_body(text)
    begun = memoryview(text.rstrip())[:-1]  # a large one is copied once
    return request.with_body(b"".join((begun, b",", orjson.dumps(changed)[1:])))


def _new_call_id() -> str:
    """Ids of later calls sort later, to the millisecond."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"
