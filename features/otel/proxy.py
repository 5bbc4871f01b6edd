"""OpenTelemetry: spans of recorded calls go out; those that agents post to `/otlp/v1/traces` become calls and actions.

What comes in is recorded in its rollout, durable before it is acknowledged, and once however often it is sent. A call
without token ids, log-probabilities and a policy version is not trained on.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from fastapi import APIRouter, Request, Response

from ...core.config.root import Config
from ...core.errors import InvalidRequest, LightningError, StoreUnavailable
from ...core.records import CallEnd, CallStart, Event, Mode, RolloutName, check_id
from ...core.tools import tool_calls
from ...proxy.access.auth import Caller
from ...proxy.api.requests import Parts, require_may_reward
from ...proxy.gateway.asgi import ClientDisconnected, read_headers, unpack
from ...proxy.hooks import Core, Hooks, ProxyPlugin
from .config import OtelConfig
from .export import Telemetry, require_sdk
from .genai_read import action_of, is_action, is_call, request_of, response_of, tokens_of
from .otlp import MEDIA, Encoding, Span, accepted, encoding_of, read_spans, refused

router = APIRouter()
log = logging.getLogger(__name__)
UPSTREAM = "otlp"
PREFIXES = ("lightning.", "agentlightning.")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]")
_INT32 = 2**31
MOST_DEPTH = 100  # of spans around one
BY_ITS_OWN_KEY = "reported through OpenTelemetry with the rollout's own key"


@dataclass(frozen=True, slots=True)
class Imported:
    """A call read from a span."""

    span: Span
    start: CallStart
    end: CallEnd

    @property
    def rollout(self) -> RolloutName:
        return self.start.rollout


@dataclass(frozen=True, slots=True)
class Action:
    """An action read from a span; `key` is the span's own, `at` when it began."""

    rollout: RolloutName
    key: str
    at: float
    event: Event


@router.post("/otlp/v1/traces", include_in_schema=False)
async def post_traces(request: Request) -> Response:
    """Record the model calls and the actions among the spans. Errors come in the shape that OTLP has for them."""
    encoding: Encoding = "json"
    try:
        encoding = encoding_of(request.headers.get("content-type", ""))
        return Response(await _record(request, encoding), media_type=MEDIA[encoding])
    except LightningError as error:
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(refused(encoding, error), error.status, headers, MEDIA[encoding])
    except ClientDisconnected:
        return Response(status_code=400)  # to nobody


async def _record(request: Request, encoding: Encoding) -> bytes:
    p: Parts = request.app.state.parts
    headers = read_headers(request.scope)
    caller = await p.keys.authenticate(headers)
    require_may_reward(caller)
    with caller.counted(), p.bodies.memory.loan(caller.owner) as loan:
        body = await p.bodies.read(request.receive, headers, loan)
        body = await unpack(body, headers.get("content-encoding", ""), p.bodies.limit, loan)
        # In threads: a large export takes a while to read, and agents wait for their answers meanwhile.
        spans, problems = await asyncio.to_thread(read_spans, body, encoding)
        found, odd = await asyncio.to_thread(read_all, spans)
        problems += odd
        admitted = await _admitted(p, caller, found, problems)
        for one in admitted:
            await _recorded(p, one, problems)
    return accepted(encoding, len(problems), "; ".join(problems[:3]))


async def _admitted(
    p: Parts, caller: Caller, found: Iterable[Imported | Action], problems: list[str]
) -> list[Imported | Action]:
    """What the caller may report of this, as it may. `problems` gets the others; if there are only these, raise one.

    The policy's code can read a rollout's own key: it is no proof.
    """
    admitted: list[Imported | Action] = []
    refused: LightningError | None = None
    for one in found:
        try:
            await p.keys.require(caller, [one.rollout.rollout_id])
            name = caller.admit(one.rollout)
        except LightningError as error:
            if error.status >= 500:
                raise
            refused = error
            problems.append(error.message)
            continue
        if isinstance(one, Action):
            admitted.append(replace(one, rollout=name))
        else:
            end = one.end if caller.rollout is None else one.end._replace(untrainable_reason=BY_ITS_OWN_KEY)
            admitted.append(Imported(one.span, one.start._replace(rollout=name), end))
    if refused is not None and not admitted:
        raise refused
    return admitted


async def _recorded(p: Parts, one: Imported | Action, problems: list[str]) -> None:
    """Record one. What is wrong with it is a problem of it alone; raise StoreUnavailable."""
    try:
        if isinstance(one, Action):
            event = await asyncio.to_thread(p.redactor.event, one.event)
            await p.store.events.post(one.rollout, [event], one.key, at=one.at)
        else:
            await _record_call(p, one)
    except StoreUnavailable:
        raise
    except Exception as error:
        log.warning("a span of rollout %s was not recorded", one.rollout.rollout_id, exc_info=error)
        problems.append(f"a span of rollout {one.rollout.rollout_id} was not recorded: {error!r:.200}")


def read_all(spans: Sequence[Span]) -> tuple[list[Imported | Action], list[str]]:
    """Return the calls and actions among spans, oldest first, and the errors of spans that cannot be taken."""
    found: list[Imported | Action] = []
    problems: list[str] = []
    for span in sorted(_with_agents(spans), key=lambda span: span.started_at):
        try:
            if is_call(span.attributes):
                found.append(read_call(span))
            elif is_action(span.attributes):
                _check(span)
                rollout, event = _rollout(span), action_of(span.attributes, span.error)
                key = f"otlp-{span.trace_id}{span.span_id}-{rollout.rollout_id}"
                found.append(Action(rollout, key, span.started_at, event))
        except InvalidRequest as error:
            problems.append(f"span {span.span_id}: {error.message}")
        except Exception as error:  # whatever attributes from outside lead to
            problems.append(f"span {span.span_id}: it cannot be read: {error!r:.200}")
    return found, problems


def read_call(span: Span) -> Imported:
    """Return the call that a span describes. Raise InvalidRequest for impossible ids and times."""
    attributes = span.attributes
    _check(span)
    request, response = request_of(attributes), response_of(attributes)
    tokens, version = tokens_of(attributes, response), _version(attributes)
    start = CallStart(
        call_id=f"{span.trace_id}{span.span_id}",
        rollout=_rollout(span),
        endpoint="chat/completions",
        model=_text(response["model"]),
        policy_version=version,
        request=request,
        started_at=span.started_at,
        upstream=UPSTREAM,
        pins=False,
        imported=True,
    )
    reason = tokens.untrainable_reason("error" if span.error else "ok", request)
    if reason is None and version is None:
        reason = "no policy version in the span"
    end = CallEnd(
        call_id=start.call_id,
        rollout_id=start.rollout.rollout_id,
        status="error" if span.error else "ok",
        response=None if span.error else response,
        http_status=None,
        prompt_token_ids=tokens.prompt_token_ids,
        choices=tokens.choices,
        usage=tokens.usage,
        tool_calls=() if span.error else tool_calls(response),
        error=span.error,
        untrainable_reason=None if reason is None else f"reported through OpenTelemetry: {reason}",
        latency_ms=(span.ended_at - span.started_at) * 1000,
        imported=True,
    )
    return Imported(span, start, end)


async def _record_call(p: Parts, call: Imported) -> None:
    """Record the call, unless it is there already: by an earlier try, or because it went through the proxy."""
    status = await p.store.calls.status(call.end.rollout_id, call.end.call_id)
    response_id = _text((call.end.response or {}).get("id"))
    if status not in (None, "incomplete"):
        return
    if status is None and response_id and await p.store.calls.giver(call.end.rollout_id, response_id):
        return
    if status is None:
        await p.recorder.start(call.start)
    else:
        p.recorder.resume(call.start)
    await (await p.recorder.end_large(call.end))
    await p.recorder.put_in_order(call.end)
    p.metrics.call_ended(call.end, True)


def _check(span: Span) -> None:
    """Raise InvalidRequest for impossible ids, or without a time."""
    if not re.fullmatch("[0-9a-f]{32}", span.trace_id) or not re.fullmatch("[0-9a-f]{16}", span.span_id):
        raise InvalidRequest("its trace id must have 16 bytes and its span id 8")
    if span.started_at <= 0:
        raise InvalidRequest("it has no time")


def _rollout(span: Span) -> RolloutName:
    """The rollout that the span or its resource names; else its trace is one."""
    found = {name: _named(span.attributes, name) for name in ("rollout_id", "task_id", "agent_name", "rollout_mode")}
    for name in ("rollout_id", "task_id", "agent_name"):
        if found[name] is not None:
            check_id(cast(str, found[name]), f"lightning.{name}")
    if found["rollout_mode"] not in (None, "train", "eval"):
        raise InvalidRequest(f"lightning.rollout_mode must be train or eval, got {found['rollout_mode']!r}")
    agent = found["agent_name"] or span.agent
    mode = cast(Mode, found["rollout_mode"] or "train")
    return RolloutName(found["rollout_id"] or span.trace_id, found["task_id"], agent, mode)


def _with_agents(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans with the agent that the nearest span around them in the same export names."""
    around = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        one = span
        for _ in range(MOST_DEPTH):
            above = around.get((one.trace_id, one.parent_id))
            if above is None or _own_agent(one) is not None:
                break
            one = above
        yield replace(span, agent=_own_agent(one))


def _own_agent(span: Span) -> str | None:
    """The agent that the span names itself, as an id."""
    return _as_id(_named(span.attributes, "agent_name") or _text(span.attributes.get("gen_ai.agent.name")))


def _named(attributes: Mapping[str, Any], name: str) -> str | None:
    value = next((attributes[p + name] for p in PREFIXES if attributes.get(p + name) is not None), None)
    return None if value is None else str(value)


def _as_id(name: str | None) -> str | None:
    """An agent's name as an id: characters that ids may not have are replaced."""
    return _NOT_IN_NAMES.sub("_", name)[:200] if name else None


def _version(attributes: Mapping[str, Any]) -> int | None:
    value = attributes.get("lightning.policy_version")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _INT32 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class OtelPlugin(ProxyPlugin):
    """Receives spans always; exports calls where `otel.otlp_endpoint` is set."""

    routers = (router,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._telemetry = config.section(OtelConfig)
        require_sdk(self._telemetry)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        if self._telemetry.otlp_endpoint is None:
            yield Hooks()
            return
        telemetry = Telemetry(self._telemetry, core.redactor)
        try:
            yield Hooks(on_call=telemetry.call_ended)
        finally:
            await telemetry.close()


plugin = OtelPlugin
