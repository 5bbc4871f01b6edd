"""Exports recorded calls as OpenTelemetry spans in the background. A collector that is away costs spans, no call."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from ...core.errors import ConfigError
from ...core.records import CallEnd, CallStart
from ...core.redact import Redactor
from .config import OtelConfig
from .genai_write import attributes_of, operation_of

log = logging.getLogger(__name__)

FLUSH_S = 3.0  # how long the remaining spans may take at the end


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

        self._content, self._redactor = config.content, redactor
        headers = {name: value.get_secret_value() for name, value in config.otlp_headers.items()}
        self._exporter = OTLPSpanExporter(endpoint=config.traces_url, headers=headers, timeout=config.timeout_s)
        resource = Resource.create({"service.name": "lightning-proxy", "service.version": version("lightning-proxy")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("lightning_proxy")
        self._propagator = TraceContextTextMapPropagator()
        self._thread = ThreadPoolExecutor(1)  # all of a conversation is redacted and written for each of its calls

    def call_ended(self, start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
        """Export the call without waiting, and log failures. `headers` are of its request, with lower-case names."""
        self._thread.submit(self._try_to_export, start, end, headers)

    def _try_to_export(self, start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
        try:
            self._export(start, end, headers)
        except Exception:
            log.exception("call %s: no span could be made of it", start.call_id)

    async def close(self) -> None:
        """Send the waiting spans for up to FLUSH_S seconds. The SDK itself would wait 30 s for a collector."""

        def close() -> None:
            self._thread.shutdown()
            self._provider.shutdown()

        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_S)
        if closing.is_alive():
            self._exporter.shutdown()  # gives up its tries; the SDK's threads end

    def _export(self, start: CallStart, end: CallEnd, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if self._redactor:
            start, shown = self._redactor.start(start)
            end = self._redactor.end(end, shown=shown)
        attributes: dict[str, Any] = attributes_of(start, end, content=self._content)
        began = int(start.started_at * 1e9)
        span = self._tracer.start_span(
            f"{operation_of(start)} {attributes.get('gen_ai.request.model', '')}".rstrip(),
            context=self._propagator.extract(headers),
            kind=SpanKind.CLIENT,
            attributes=attributes,
            start_time=began,
        )
        if end.status != "ok":
            span.set_status(Status(StatusCode.ERROR, end.error))
        span.end(began + int(end.latency_ms * 1e6))


def require_sdk(config: OtelConfig) -> None:
    """Raise ConfigError if spans are to be exported and the SDK is not there."""
    if config.otlp_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"otel.otlp_endpoint needs OpenTelemetry's SDK ({error.name}): pip install 'lightning-proxy[otel]'"
        ) from None
