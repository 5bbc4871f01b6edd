"""Exports recorded calls as OpenTelemetry spans, and records the spans that agents post to `/otlp/v1/traces`.

Incoming spans are stored before they are acknowledged, and only once even if they are sent again. A call that lacks
token ids, log-probabilities or a policy version, or came with a rollout's own key, is not trained on.

Outgoing spans are sent in the background, with the attributes of
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/, and `lightning.…` for everything else.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, Request, Response

from ...core.config.root import Config
from ...core.errors import ConfigError, InvalidRequest, LightningError, Unsupported
from ...core.prices import Used, used
from ...core.records import CallEnd, CallStart, Mode, RolloutName, check_id
from ...core.redact import Redactor
from ...core.tools import tool_calls
from ...proxy.access.auth import Caller
from ...proxy.api.requests import Parts, require_may_reward
from ...proxy.gateway.asgi import ClientDisconnected, read_headers, unpack
from ...proxy.hooks import Core, Hooks, ProxyPlugin
from .config import OtelConfig
from .genai import CALLS, PARAMETERS, action_of, is_action, operation_of, request_of, response_of, tokens_of

if TYPE_CHECKING:
    from .otlp import Encoding, Span

router = APIRouter()
log = logging.getLogger(__name__)
INSTALL = "pip install 'lightning-proxy[otel]'"
POST_S = 10.0  # for one post, with its retries
FLUSH_S = 3.0  # how long the remaining spans may take at the end
_PARAMETERS = {field: name for name, field in PARAMETERS.items()}
_PARAMETERS |= dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]")
MOST_DEPTH = 100  # of spans around one
BY_ITS_OWN_KEY = "reported through OpenTelemetry with the rollout's own key"


@router.post("/otlp/v1/traces", include_in_schema=False)
async def post_traces(request: Request) -> Response:
    """Record the model calls and actions among the posted spans."""
    try:
        from . import otlp
    except ImportError as error:
        raise Unsupported(f"receiving spans needs the module {error.name}: {INSTALL}") from None
    encoding: Encoding = "json"
    try:
        encoding = otlp.encoding_of(request.headers.get("content-type", ""))
        problems = await _record(request, encoding)
        answer = otlp.accepted(encoding, len(problems), "; ".join(problems[:3]))
        return Response(answer, media_type=otlp.MEDIA[encoding])
    except LightningError as error:
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(otlp.refused(encoding, error), error.status, headers, otlp.MEDIA[encoding])
    except ClientDisconnected:
        return Response(status_code=400)  # to nobody


async def _record(request: Request, encoding: Encoding) -> list[str]:
    """Record the calls and actions among the spans, oldest first. Return an error for each one that failed."""
    from .otlp import read_spans

    p: Parts = request.app.state.parts
    headers = read_headers(request.scope)
    caller = await p.keys.authenticate(headers)
    require_may_reward(caller)
    with caller.counted(), p.bodies.memory.loan(caller.owner) as loan:
        body = await p.bodies.read(request.receive, headers, loan)
        body = await unpack(body, headers.get("content-encoding", ""), p.bodies.limit, loan)
        # In threads: a large export takes a while to read, and agents wait for their answers meanwhile.
        spans, problems = await asyncio.to_thread(read_spans, body, encoding)
        admitted, refusal = 0, None
        for span in sorted(_with_agents(spans), key=lambda span: span.started_at):
            is_call = operation_of(span.attributes) in CALLS
            if not (is_call or is_action(span.attributes)):
                continue
            try:
                rollout = _rollout(span)
                await p.keys.require(caller, [rollout.rollout_id])
                rollout = caller.admit(rollout)
                admitted += 1
                if is_call:
                    await _record_call(p, span, rollout, caller)
                    continue
                action = await asyncio.to_thread(action_of, span.attributes, span.error)
                event = await asyncio.to_thread(p.redactor.event, action)
                key = f"otlp-{span.trace_id}{span.span_id}-{rollout.rollout_id}"
                await p.store.events.post(rollout, [event], key, at=span.started_at)
            except LightningError as error:
                if error.status >= 500:
                    raise
                refusal = refusal if isinstance(error, InvalidRequest) else error
                problems.append(f"span {span.span_id}: {error.message}")
            except Exception as error:  # whatever attributes from outside lead to
                log.warning("span %s was not recorded", span.span_id, exc_info=error)
                problems.append(f"span {span.span_id} was not recorded: {error!r:.200}")
        if refusal is not None and not admitted:
            raise refusal
    return problems


async def _record_call(p: Parts, span: Span, rollout: RolloutName, caller: Caller) -> None:
    """Record the call, unless an earlier attempt recorded it or it went through the proxy."""
    start, end = await asyncio.to_thread(_call, span, rollout)
    if caller.rollout is not None:  # the policy's code can read a rollout's own key: it is no proof
        end = end._replace(untrainable_reason=BY_ITS_OWN_KEY)
    status = await p.store.calls.status(end.rollout_id, end.call_id)
    response_id = (end.response or {}).get("id")
    if status not in (None, "incomplete"):
        return
    if status is not None:
        p.recorder.resume(start)
    elif isinstance(response_id, str) and response_id and await p.store.calls.giver(end.rollout_id, response_id):
        return
    else:
        await p.recorder.start(start)
    await (await p.recorder.end_large(end))
    await p.recorder.put_in_order(end)
    p.metrics.call_ended(end, True)


def _call(span: Span, rollout: RolloutName) -> tuple[CallStart, CallEnd]:
    request, response = request_of(span.attributes), response_of(span.attributes)
    tokens = tokens_of(span.attributes, response)
    version = span.attributes.get("lightning.policy_version")
    version = version if type(version) is int and 0 <= version < 2**31 else None
    model = response["model"] if isinstance(response["model"], str) else None
    start = CallStart(
        f"{span.trace_id}{span.span_id}", rollout, "chat/completions", model, policy_version=version, request=request,
        started_at=span.started_at, upstream="otlp", pins=False, imported=True,
    )  # fmt: skip
    reason = tokens.untrainable_reason("error" if span.error else "ok", request)
    if reason is None and version is None:
        reason = "no policy version in the span"
    end = CallEnd(
        start.call_id, rollout.rollout_id, status="error" if span.error else "ok", error=span.error, imported=True,
        response=None if span.error else response, http_status=None, usage=tokens.usage,
        prompt_token_ids=tokens.prompt_token_ids, choices=tokens.choices,
        tool_calls=() if span.error else tool_calls(response),
        untrainable_reason=None if reason is None else f"reported through OpenTelemetry: {reason}",
        latency_ms=(span.ended_at - span.started_at) * 1000,
    )  # fmt: skip
    return start, end


def _rollout(span: Span) -> RolloutName:
    """The rollout that the span names, or else one with its trace id. Raises InvalidRequest if the span is invalid."""
    if not re.fullmatch("[0-9a-f]{32}", span.trace_id) or not re.fullmatch("[0-9a-f]{16}", span.span_id):
        raise InvalidRequest("a trace id must be 16 bytes in hexadecimal, a span id 8 bytes")
    if span.started_at <= 0:
        raise InvalidRequest("the span has neither a start time nor an end time")
    ids = {name: _named(span, name) for name in ("rollout_id", "task_id", "agent_name")}
    for name, value in ids.items():
        if value is not None:
            check_id(value, f"lightning.{name}")
    if (mode := _named(span, "rollout_mode") or "train") not in ("train", "eval"):
        raise InvalidRequest(f"lightning.rollout_mode must be train or eval, got {mode!r}")
    agent = ids["agent_name"] or span.agent
    return RolloutName(ids["rollout_id"] or span.trace_id, ids["task_id"], agent, cast(Mode, mode))


def _with_agents(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans, each with its own agent or that of the nearest enclosing span in the export that names one."""
    around = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        one: Span | None = span
        for _ in range(MOST_DEPTH):
            if one is None or _own_agent(one) is not None:
                break
            one = around.get((one.trace_id, one.parent_id))
        yield replace(span, agent=None if one is None else _own_agent(one))


def _own_agent(span: Span) -> str | None:
    """The agent that the span itself names, as an id: characters not allowed in ids are replaced."""
    name: Any = _named(span, "agent_name") or span.attributes.get("gen_ai.agent.name")
    if name is None and operation_of(span.attributes) == "invoke_agent":
        name = span.attributes.get("agent.name")  # OpenInference's
    return _NOT_IN_NAMES.sub("_", name)[:200] if name and isinstance(name, str) else None


def _named(span: Span, name: str) -> str | None:
    value = span.attributes.get(f"lightning.{name}")
    return None if value is None else str(value)


class Telemetry:
    """Sends calls as spans from a background thread. A span's parent is the one in the agent's `traceparent`."""

    def __init__(self, config: OtelConfig, redactor: Redactor) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._redactor = redactor
        headers = {name: value.get_secret_value() for name, value in config.otlp_headers.items()}
        endpoint = f"{(config.otlp_endpoint or '').rstrip('/')}/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=endpoint, headers=headers, timeout=POST_S)
        resource = Resource.create({"service.name": "lightning-proxy", "service.version": version("lightning-proxy")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("lightning_proxy")
        self._propagator = TraceContextTextMapPropagator()

    def call_ended(self, start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
        """Queue the call's span for export. `headers`: the request's, with lower-case names."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        try:
            attributes = {
                name: self._redactor.text(value) if isinstance(value, str) else value
                for name, value in attributes_of(start, end).items()
            }
            began = int(start.started_at * 1e9)
            span = self._tracer.start_span(
                f"{attributes['gen_ai.operation.name']} {attributes.get('gen_ai.request.model', '')}".rstrip(),
                self._propagator.extract(headers), SpanKind.CLIENT, attributes, start_time=began,
            )  # fmt: skip
            if end.status != "ok":
                span.set_status(Status(StatusCode.ERROR, end.error and self._redactor.text(end.error)))
            span.end(began + int(end.latency_ms * 1e6))
        except Exception:
            log.exception("no span could be made from call %s", start.call_id)

    async def close(self) -> None:
        """Send the waiting spans, and give up after FLUSH_S seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_S)
        if closing.is_alive():
            self._exporter.shutdown()  # gives up its tries; the SDK's threads end


def attributes_of(start: CallStart, end: CallEnd) -> dict[str, Any]:
    """Return the span's attributes: numbers and names, no message text."""
    request, rollout = start.request, start.rollout
    response = end.response if isinstance(end.response, dict) else {}
    is_streamed, tokens = request.get("stream") is True, used(end.usage) or Used()
    told = {
        "gen_ai.operation.name": "text_completion" if start.endpoint == "completions" else "chat",
        "gen_ai.provider.name": "anthropic" if start.endpoint == "messages" else "openai",
        "gen_ai.request.model": request.get("model"),
        "gen_ai.request.stream": is_streamed or None,
        "gen_ai.response.id": response.get("id"),
        "gen_ai.response.model": response.get("model"),
        "gen_ai.response.finish_reasons": [c.finish_reason for c in end.choices if c.finish_reason] or None,
        "gen_ai.response.time_to_first_chunk": end.ttft_ms / 1000 if is_streamed and end.ttft_ms is not None else None,
        "gen_ai.usage.input_tokens": tokens.input or None,
        "gen_ai.usage.output_tokens": tokens.output or None,
        "gen_ai.agent.name": rollout.agent,
        "error.type": None if end.status == "ok" else str(end.http_status or end.status),
        "lightning.rollout_id": rollout.rollout_id,
        "lightning.task_id": rollout.task_id,
        "lightning.agent_name": rollout.agent,
        "lightning.rollout_mode": rollout.mode,
        "lightning.call_id": start.call_id,
        "lightning.upstream": end.fallback or start.upstream,
        "lightning.policy_version": None if end.fallback else start.policy_version,
        "lightning.trainable": end.trainable,
        "lightning.untrainable_reason": end.untrainable_reason,
        "lightning.ttft_ms": end.ttft_ms,
    }
    told |= {f"gen_ai.request.{name}": request.get(field) for field, name in _PARAMETERS.items() if field in request}
    return {name: value for name, value in told.items() if isinstance(value, str | int | float | list)}


class OtelPlugin(ProxyPlugin):
    routers = (router,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._telemetry = config.section(OtelConfig)
        if self._telemetry.otlp_endpoint is not None:
            try:
                import opentelemetry.exporter.otlp.proto.http.trace_exporter
                import opentelemetry.sdk.trace  # noqa: F401
            except ImportError as error:
                raise ConfigError(f"otel.otlp_endpoint needs the module {error.name}: {INSTALL}") from None

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
