"""Exports recorded calls as OpenTelemetry spans in the background. A collector that is away costs spans, no call.

Their attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. What these have no name for is
`lightning.…`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from ...core.errors import ConfigError
from ...core.prices import Used, used
from ...core.records import CallEnd, CallStart
from ...core.redact import Redactor
from .config import OtelConfig
from .genai import PARAMETERS

log = logging.getLogger(__name__)
INSTALL = "pip install 'lightning-proxy[otel]'"
POST_S = 10.0  # for one post, with its retries
FLUSH_S = 3.0  # how long the remaining spans may take at the end
_PARAMETERS = {field: name for name, field in PARAMETERS.items()} | {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
}


class Telemetry:
    """Keeps spans in memory, up to a limit, until a thread has sent them. The agent's `traceparent` is their parent."""

    def __init__(self, config: OtelConfig, redactor: Redactor) -> None:
        """Raises ConfigError without the SDK."""
        require_sdk(config)
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
        """Export the call without waiting, and log failures. `headers` are of its request, with lower-case names."""
        try:
            self._export(start, end, headers)
        except Exception:
            log.exception("call %s: no span could be made of it", start.call_id)

    async def close(self) -> None:
        """Send the waiting spans for up to FLUSH_S seconds. The SDK itself would wait 30 s for a collector."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_S)
        if closing.is_alive():
            self._exporter.shutdown()  # gives up its tries; the SDK's threads end

    def _export(self, start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        attributes = {
            name: self._redactor.text(value) if isinstance(value, str) else value
            for name, value in attributes_of(start, end).items()
        }
        began = int(start.started_at * 1e9)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {attributes.get('gen_ai.request.model', '')}".rstrip(),
            context=self._propagator.extract(headers),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=began,
        )
        if end.status != "ok":
            span.set_status(Status(StatusCode.ERROR, end.error and self._redactor.text(end.error)))
        span.end(began + int(end.latency_ms * 1e6))


def require_sdk(config: OtelConfig) -> None:
    """Raise ConfigError if spans are to be exported and the SDK is not there."""
    if config.otlp_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"otel.otlp_endpoint needs OpenTelemetry's SDK ({error.name}): {INSTALL}") from None


def attributes_of(start: CallStart, end: CallEnd) -> dict[str, Any]:
    """Return the span's attributes: numbers and names, nothing of what was said."""
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
