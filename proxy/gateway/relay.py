"""The data path (/v1/… and /rollouts/{id}/…/v1/…) as a raw ASGI app: admits requests and passes them on.

If a response that is polled or resumed has ended, its end is added to the record of its call.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote
from uuid import uuid4

import orjson
from starlette.types import Receive, Scope, Send

from ...core.config.root import Config
from ...core.errors import Forbidden, InvalidRequest, LightningError, MethodNotAllowed, NotFound
from ...core.http import LARGE, in_thread_if_large
from ...core.json_text import as_utf8, loads, loads_in_turns
from ...core.records import CallStart, Mode, RolloutName, check_id
from ...core.values import is_under_way
from ...store.calls import Giver
from ..access.auth import Caller, Keys, credentials
from ..dialects.chat import ChatApi
from ..dialects.messages import MessagesApi
from ..dialects.responses import ResponsesApi
from ..dialects.stream import BufferedTranscript, Dialect, Injection, Transcript
from .asgi import Bodies, ClientDisconnected, Loan, Reply, read_headers, unpack
from .attempts import Attempts, form_model, is_form
from .call import Gateway, Question, end_of, model_of
from .unnamed import Conversation, UnnamedRollouts, end_statements
from .upstream import Request, Route

log = logging.getLogger(__name__)

# Not TRACE: its answer is the request, with what we add to it.
_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
_READS = ("GET", "HEAD")
_NOBODY = Caller(None, forward_authorization=False)  # sends a browser's CORS preflight; its body is not read
_RESPONSES = "/v1/responses/"
_COMPACT = "/v1/responses/compact"
# A body that unpacks to more than this many times its bytes counts until its call ends: it costs its sender nothing.
MOST_UNPACKED = 20
_OPERATOR_ROUTES = frozenset({"load_lora_adapter", "unload_lora_adapter"})
# What a server behind us might resolve to another path than the one that was checked.
_AMBIGUOUS = re.compile(r"\.\.|//|/\.(?:/|$)|[\\\x00-\x1f\x7f]")

_ROLLOUT = "/rollouts/(?P<rollout>[^/]*)(?:/tasks/(?P<task>[^/]*))?(?:/agents/(?P<agent>[^/]*))?"
_PATH = re.compile(f"(?:{_ROLLOUT})?(?P<rest>/v1/.*)", re.DOTALL)

# The recorded APIs.
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatApi("chat"),
    "/v1/completions": ChatApi("completions"),
    "/v1/responses": ResponsesApi(),
    "/v1/messages": MessagesApi(),
}
RESPONSES_API = DIALECTS["/v1/responses"]


class DataPath(NamedTuple):
    """A path of the data API. `rest` begins with /v1/; the ids come from the URL, unchecked."""

    rest: str
    rollout_id: str | None = None
    task_id: str | None = None
    agent: str | None = None


def parse_path(path: str) -> DataPath | None:
    """Split /rollouts/{rollout_id}[/tasks/{task_id}][/agents/{agent}]/v1/…, or /v1/…, without decoding it.

    Returns None for any other path, which the control API answers.
    """
    match = _PATH.fullmatch(path)
    return None if match is None else DataPath(match["rest"], match["rollout"], match["task"], match["agent"])


def name_rollout(path: DataPath, headers: Mapping[str, str], key_rollout_id: str | None = None) -> RolloutName:
    """Return the rollout named by header, URL or key, in this order; else a new one, which is not `named`.

    `headers` have lower-case names. Raises InvalidRequest for an invalid id or mode.
    """
    if "x-rollout-id" in headers:
        path = DataPath(path.rest)
    names: list[str | None] = []
    for header, field in (("X-Rollout-Id", "rollout_id"), ("X-Task-Id", "task_id"), ("X-Agent-Name", "agent")):
        in_path = getattr(path, field)
        value = headers.get(header.lower()) if in_path is None else in_path
        names.append(value if value is None else check_id(value, header if in_path is None else field))
    name, task_id, agent = names
    mode = headers.get("x-rollout-mode", "train")
    if mode not in ("train", "eval"):
        raise InvalidRequest(f"X-Rollout-Mode must be train or eval, got {mode[:60]!r}", param="X-Rollout-Mode")
    named = name is not None or key_rollout_id is not None
    return RolloutName(name or key_rollout_id or uuid4().hex, task_id, agent, cast(Mode, mode), named)


def wants_recording(headers: Mapping[str, str]) -> bool:
    """Return False if X-Recording is `off`. Raise InvalidRequest if it is not on, off or only."""
    value = headers.get("x-recording", "on").lower()
    if value not in ("on", "off", "only"):
        raise InvalidRequest(f"X-Recording must be on, off or only, got {value[:60]!r}", param="X-Recording")
    return value != "off"


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; raise InvalidRequest for anything else."""
    try:
        value = loads(body) if len(body) < LARGE else loads_in_turns(body)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return value


def parse_any(body: bytes) -> dict[str, Any]:
    """Return the JSON object in an unrecorded request's body, or a form's `model`; {} if there is neither."""
    if is_form(body):
        match = form_model(body)
        return {} if match is None else {"model": match[1].decode(errors="replace")}
    try:
        body = as_utf8(body)
        return parse_object(body) if body.lstrip().startswith(b"{") else {}
    except InvalidRequest:
        return {}


class Visit(NamedTuple):
    """An admitted request, with its sender and its rollout. `headers` have lower-case names."""

    scope: Scope
    path: str
    headers: dict[str, str]
    caller: Caller
    rollout: RolloutName

    def request(self, body: bytes, loan: Loan | None = None, *, identity: bool = False) -> Request:
        """Return the request to send upstream. Once it is sent, `loan` is given back."""
        return Request(
            method=self.scope["method"],
            path=self.path,
            query=self.scope["query_string"],
            headers=list(self.scope["headers"]),
            body=body,
            forward_authorization=self.caller.forward_authorization,
            identity=identity,
            sent=loan.shrink if loan is not None and loan.size else None,
        )


class Relay:
    """Admits requests, hands model calls to the gateway, lists models, and forwards all other requests unrecorded."""

    def __init__(self, config: Config, keys: Keys, gateway: Gateway, bodies: Bodies) -> None:
        self._keys = keys
        self._gateway = gateway
        self._bodies = bodies
        self._policy = gateway.policy
        self._upstreams = gateway.upstreams
        self._ending: dict[str, asyncio.Future[None]] = {}  # calls with responses that went on, by id
        self._named = {upstream.name: upstream for upstream in config.upstreams}

    async def __call__(self, scope: Scope, receive: Receive, send: Send, path: DataPath | None = None) -> None:
        """Answer a request. `path`: the request's path, if already parsed."""
        path = path or parse_path(scope["path"]) or DataPath("")
        dialect = DIALECTS.get(path.rest)
        reply = Reply(receive, send, dialect.error_body if dialect else LightningError.body)
        try:
            visit = await self._let_in(scope, path)
            caller, state = visit.caller, scope.setdefault("state", {})  # as the control API has it
            if caller is not _NOBODY:
                state["caller"] = caller
            with self._bodies.memory.loan(caller.owner) as loan, caller.counted(answers=True):
                state["loan"] = loan
                await self._handle(visit, receive, reply, loan)
        except ClientDisconnected:
            return
        except LightningError as error:
            await _show(reply, error)
        except RecursionError:
            await _show(reply, InvalidRequest("the request body is nested too deeply"))
        except Exception:
            log.exception("%s %s: internal error", scope["method"], scope["path"])
            await _show(reply, LightningError("internal error of the proxy; see its log"))

    async def _let_in(self, scope: Scope, path: DataPath) -> Visit:
        if not path.rest or not _is_allowed(path.rest):
            raise NotFound(f"no such route: {scope['method']} {scope['path']}")
        if scope["method"] not in _METHODS:
            raise MethodNotAllowed(f"{scope['method']} is not forwarded")
        headers = read_headers(scope)
        caller = _NOBODY if _is_preflight(scope, headers) else await self._keys.authenticate(headers)
        rollout = caller.admit(name_rollout(path, headers, caller.rollout_id))
        if caller.rollout is not None and caller.rollout.ended:
            raise Forbidden(
                f"rollout {caller.rollout_id!r} has ended: its key cannot make more calls", code="rollout_ended"
            )
        return Visit(scope, path.rest, headers, caller, rollout)

    async def _handle(self, visit: Visit, receive: Receive, reply: Reply, loan: Loan) -> None:
        body = b"" if visit.caller is _NOBODY else await self._bodies.read(receive, visit.headers, loan)
        if visit.caller.own and visit.rollout.named:  # only now: while its body came, another key may have opened it
            await self._keys.require(visit.caller, [visit.rollout.rollout_id])
        method, path = visit.scope["method"], visit.path
        dialect = DIALECTS.get(path) if method == "POST" else None
        if dialect is not None:
            await self._gateway.answer(await self._question(visit, body, dialect, loan), reply)
        elif method in _READS and path == "/v1/models":
            request = visit.request(body, identity=True)._replace(method="GET")  # to HEAD, the server sends no body
            await self._list_models(request, visit.rollout, reply)
        elif method in _READS and path == f"/v1/models/{self._policy.alias}":
            await reply.json(200, self._policy.alias_entry())
        else:
            request = visit.request(body, loan)._replace(path=_as_escaped(visit.scope, path))
            await self._pass_through(visit, request, reply)

    async def _question(self, visit: Visit, body: bytes, dialect: Dialect, loan: Loan) -> Question:
        recorded = wants_recording(visit.headers)
        if not recorded and visit.caller.rollout is not None:
            raise Forbidden("a rollout's own key cannot turn recording off", param="X-Recording")
        most = MOST_UNPACKED * len(body)
        if "content-encoding" in visit.headers and not body.startswith(b"{"):  # some send it with a plain body
            body = await unpack(body, visit.headers["content-encoding"], self._bodies.limit, loan)
            kept = [header for header in visit.scope["headers"] if header[0] != b"content-encoding"]
            visit = visit._replace(scope={**visit.scope, "headers": kept})
        request = visit.request(as_utf8(body), loan if len(body) <= most else None, identity=True)
        return Question(
            request=request,
            body=await in_thread_if_large(len(request.body), partial(parse_object, request.body)),
            headers=visit.headers,
            dialect=dialect,
            name=visit.rollout,
            limiter=visit.caller.limiter,
            recorded=recorded and visit.caller.recorded,
        )

    async def _list_models(self, request: Request, rollout: RolloutName, reply: Reply) -> None:
        """Answer with the upstream's list plus the alias. An answer that is not a list passes unchanged."""
        route = await self._policy.route(rollout, None)
        async with Attempts(self._upstreams, route, request, {}) as answer:
            raw = await answer.read()
            if answer.status == 200:
                with suppress(orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
                    models = orjson.loads(raw)
                    models["data"].append(self._policy.alias_entry())
                    raw = orjson.dumps(models)
            await reply.send(answer.status, answer.headers(keep_length=False), raw)

    async def _pass_through(self, visit: Visit, request: Request, reply: Reply) -> None:
        """Forward a request unrecorded, to the upstream that gave the response in its path or to the one for its model.

        The end of a background response, and the items of a compacted conversation, are recorded on the way.
        """
        body = await in_thread_if_large(len(request.body), partial(parse_any, request.body))
        unnamed, is_response, giver = self._gateway.unnamed, visit.path.startswith(_RESPONSES), None
        if unnamed is not None and is_response:
            response_id = visit.path.removeprefix(_RESPONSES).partition("/")[0]
            giver = await unnamed.giver(credentials(visit.headers), visit.rollout, response_id)
        if giver is not None and giver.upstream in self._named:
            rollout = visit.rollout._replace(rollout_id=giver.rollout_id)
            route = Route(self._named[giver.upstream], None, None)
        else:
            rollout, route = visit.rollout, await self._policy.route(visit.rollout, model_of(body))
        request = request._replace(rollout_id=rollout.rollout_id, identity=is_response)
        with reply.while_connected():
            async with Attempts(self._upstreams, route, request, body) as answer:
                log.info("%s %s: forwarded, answered with %d", request.method, visit.path, answer.status)
                await reply.start(answer.status, answer.headers(keep_length=True))
                if is_response and answer.status == 200:
                    transcript: Transcript | BufferedTranscript
                    if answer.is_stream:
                        transcript = RESPONSES_API.stream(Injection())
                    else:
                        transcript = BufferedTranscript(RESPONSES_API, Injection(), answer.status, translated=False)
                        transcript.shown = True
                    while not transcript.ended and (piece := await answer.piece()):
                        await reply.body(transcript.feed(piece))
                    if not transcript.ended:
                        await reply.body(transcript.end())
                    await self._put_into_record(visit, body, giver, transcript)
                    await reply.body(transcript.held)
                while data := await answer.piece():
                    await reply.body(data)
                await reply.body(b"", more=False)

    async def _put_into_record(
        self, visit: Visit, body: dict[str, Any], giver: Giver | None, transcript: Transcript | BufferedTranscript
    ) -> None:
        response, unnamed = transcript.response(), self._gateway.unnamed
        if not transcript.ended or not isinstance(response, dict) or unnamed is None:
            return
        if visit.path == _COMPACT:
            if not visit.rollout.named and wants_recording(visit.headers):
                await unnamed.compacted(credentials(visit.headers), body, visit.rollout, response)
        elif giver is not None and is_under_way(giver.response) and response.get("id") == giver.response["id"]:
            if "status" not in response or is_under_way(response):
                return
            if giver.call_id not in self._ending:  # two clients that poll at once record it once
                ending = asyncio.ensure_future(self._end(unnamed, giver.call_id, transcript, visit))
                self._ending[giver.call_id] = ending
                ending.add_done_callback(lambda _: self._ending.pop(giver.call_id))
            await asyncio.shield(self._ending[giver.call_id])

    async def _end(
        self, unnamed: UnnamedRollouts, call_id: str, transcript: Transcript | BufferedTranscript, visit: Visit
    ) -> None:
        """Record the end of a call whose response went on after its answer (`background: true`, or a broken stream)."""
        gateway, call = self._gateway, await unnamed.call(call_id)
        if not is_under_way(call.response):
            return
        status, error = transcript.response()["status"], transcript.error
        if error is None and status in ("failed", "cancelled"):
            error = f"the upstream reports a response with status {status}"
        kept = {name: getattr(call, name) for name in CallStart._fields if hasattr(call, name)}
        start = CallStart(rollout=visit.rollout._replace(rollout_id=call.rollout_id), **kept)
        end = end_of(
            start, transcript, "ok" if error is None else "error", error, sent=call.request, version=call.policy_version
        )._replace(
            http_status=call.http_status,
            ttft_ms=call.ttft_ms,
            latency_ms=(time.time() - call.started_at) * 1000,
        )
        conversation = await asyncio.to_thread(Conversation, credentials(visit.headers), start.rollout, call.request)
        gateway.recorder.resume(start)
        also = [] if visit.rollout.named else end_statements(start, conversation, end)
        await gateway.recorder.end(end, also, counted=call.status != "incomplete")
        gateway.ended(start, end, visit.headers, visit.caller.limiter)


async def _show(reply: Reply, error: LightningError) -> None:
    """Send the error. If the answer has begun, leave it unfinished: the server closes the connection."""
    if reply.started:
        log.warning("the answer was interrupted: %s", error.message)
    else:
        await reply.error(error)


def _is_allowed(path: str) -> bool:
    """Whether a path may be forwarded: it is unambiguous, even if decoded again, and is not an operator route."""
    if path in DIALECTS:
        return True
    for _ in range(3):
        names = (part.strip() for part in re.split("[/;]", path.lower()))
        if _AMBIGUOUS.search(path) or not _OPERATOR_ROUTES.isdisjoint(names):
            return False
        path, before = unquote(path), path
        if path == before:
            return True
    return False


def _as_escaped(scope: Scope, path: str) -> str:
    """The path as the agent escaped it if that certainly decodes to `path`, else `path` escaped by us."""
    sent = parse_path(scope["raw_path"].decode())
    return sent.rest if sent and unquote(sent.rest) == path and "\ufffd" not in path else quote(path)


def _is_preflight(scope: Scope, headers: dict[str, str]) -> bool:
    """Whether this is a browser's CORS preflight, which carries no key. https://fetch.spec.whatwg.org"""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
