"""Exports recorded calls as OpenTelemetry spans in the background. A collector that is away costs spans, no call.

Their attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. What these have no name for is
`lightning.…`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from ...core.errors import ConfigError
from ...core.json_text import dumps, loads
from ...core.records import CallEnd, CallStart
from ...core.redact import Redactor
from ...core.tools import dicts
from .config import OtelConfig

log = logging.getLogger(__name__)
FLUSH_S = 3.0  # how long the remaining spans may take at the end
Json = dict[str, Any]
# By the field of a request, in any of the recorded APIs.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "n": "choice.count",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
}
# What the recorded APIs say in place of the conventions' word.
_REASONS = {
    "tool_calls": "tool_call", "function_call": "tool_call", "tool_use": "tool_call", "end_turn": "stop",
    "stop_sequence": "stop", "completed": "stop", "max_tokens": "length", "incomplete": "length",
    "refusal": "content_filter", "failed": "error",
}  # fmt: skip
_RESULTS = ("tool_result", "function_call_output", "custom_tool_call_output")


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


def operation_of(start: CallStart) -> str:
    return "text_completion" if start.endpoint == "completions" else "chat"


def attributes_of(start: CallStart, end: CallEnd, *, content: bool) -> dict[str, Any]:
    """Return the span's attributes, with the conversation's text only if `content` is true."""
    response = end.response if isinstance(end.response, dict) else {}
    usage = end.usage or {}
    found = {
        "gen_ai.operation.name": operation_of(start),
        "gen_ai.provider.name": "anthropic" if start.endpoint == "messages" else "openai",
        "gen_ai.request.model": _text(start.request.get("model")),
        "gen_ai.response.id": _text(response.get("id")),
        "gen_ai.response.model": _text(response.get("model")),
        "gen_ai.response.finish_reasons": [c.finish_reason for c in end.choices if c.finish_reason] or None,
        "gen_ai.usage.input_tokens": _count(usage.get("prompt_tokens", usage.get("input_tokens"))),
        "gen_ai.usage.output_tokens": _count(usage.get("completion_tokens", usage.get("output_tokens"))),
        "gen_ai.agent.name": start.rollout.agent,
        "error.type": None if end.status == "ok" else str(end.http_status or end.status),
        "lightning.rollout_id": start.rollout.rollout_id,
        "lightning.task_id": start.rollout.task_id,
        "lightning.agent_name": start.rollout.agent,
        "lightning.rollout_mode": start.rollout.mode,
        "lightning.call_id": start.call_id,
        "lightning.upstream": end.fallback or start.upstream,
        "lightning.policy_version": None if end.fallback else start.policy_version,
        "lightning.trainable": end.trainable,
        "lightning.untrainable_reason": end.untrainable_reason,
        "lightning.ttft_ms": end.ttft_ms,
    }
    found |= _parameters(start.request)
    if start.request.get("stream") is True and end.ttft_ms is not None:
        found["gen_ai.response.time_to_first_chunk"] = end.ttft_ms / 1000
    if content:
        messages = {
            "gen_ai.system_instructions": system_instructions(start.request),
            "gen_ai.input.messages": input_messages(start.request),
            "gen_ai.tool.definitions": [_tool(tool) for tool in dicts(start.request.get("tools"))],
            "gen_ai.output.messages": output_messages(response),
        }
        found |= {name: dumps(value) for name, value in messages.items() if value}
    return {name: value for name, value in found.items() if value is not None}


def _parameters(request: Json) -> dict[str, Any]:
    found: dict[str, Any] = {"gen_ai.request.stop_sequences": _stops(request)}
    for name, as_name in _PARAMETERS.items():
        value = request.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"gen_ai.request.{as_name}"] = value
    return found | ({"gen_ai.request.stream": True} if request.get("stream") is True else {})


def system_instructions(request: Json) -> list[Json]:
    """Return the instructions that were given apart from the conversation, in parts."""
    return [part for name in ("system", "instructions") if request.get(name) for part in _parts(request[name])]


def input_messages(request: Json) -> list[Json]:
    """Return the conversation that the model was shown, of any recorded API, as messages in parts."""
    messages = request.get("messages", request.get("input", request.get("prompt")))
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        return [{"role": "user", "parts": list(_parts(messages))}]
    return [_message(item) for item in messages]


def output_messages(response: Json) -> list[Json]:
    """Return the model's answer, each choice a message."""
    if isinstance(output := response.get("output"), list):
        items = [part for item in dicts(output) for part in _message(item)["parts"]]
        return [{"role": "assistant", "parts": items, "finish_reason": _reason(response.get("status"))}]
    if "content" in response:
        parts = list(_parts(response["content"]))
        return [{"role": "assistant", "parts": parts, "finish_reason": _reason(response.get("stop_reason"))}]
    found = []
    for choice in dicts(response.get("choices")):
        message = choice.get("message")
        shown = _message(message if isinstance(message, dict) else {"content": choice.get("text")})
        found.append(shown | {"role": "assistant", "finish_reason": _reason(choice.get("finish_reason"))})
    return found


def _message(item: Json) -> Json:
    """A chat's message, an item of Responses, or a message of Anthropic's, in the conventions' shape."""
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments", item.get("input"))
        return {"role": "assistant", "parts": [_call(item.get("call_id"), item.get("name"), arguments)]}
    if kind in _RESULTS:
        return {"role": "tool", "parts": [_response(item.get("call_id"), item.get("output"))]}
    if kind == "reasoning":
        return {"role": "assistant", "parts": _reasoning(item.get("summary"), item.get("content"))}
    if item.get("role") == "tool":
        return {"role": "tool", "parts": [_response(item.get("tool_call_id"), item.get("content"))]}
    calls = []
    for call in dicts(item.get("tool_calls")):
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        calls.append(_call(call.get("id"), function.get("name"), function.get("arguments")))
    thought = _reasoning(item.get("reasoning_content") or item.get("reasoning"))
    return {"role": str(item.get("role", "assistant")), "parts": [*thought, *_parts(item.get("content")), *calls]}


def _parts(content: Any) -> Iterator[Json]:
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        if not isinstance(part, dict):
            yield {"type": "text", "content": str(part)}
        elif part.get("type") == "tool_use":
            yield _call(part.get("id"), part.get("name"), part.get("input"))
        elif part.get("type") in _RESULTS:
            yield _response(part.get("tool_use_id"), part.get("content"))
        elif part.get("type") == "thinking":
            yield from _reasoning(part.get("thinking"))
        elif isinstance(part.get("text"), str):
            yield {"type": "text", "content": part["text"]}
        else:
            yield part


def _reasoning(*contents: Any) -> list[Json]:
    """A part for each text in the contents."""
    parts = (part for content in contents for part in _parts(content))
    return [{"type": "reasoning", "content": part["content"]} for part in parts if part.get("content")]


def _call(call_id: Any, name: Any, arguments: Any) -> Json:
    """A tool call. Its arguments are a value; text that is no JSON stays as it is."""
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = loads(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _tool(tool: Json) -> Json:
    """A tool's definition, from chat's, Responses' or Anthropic's."""
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    found = {"name": function.get("name"), "description": function.get("description")}
    found["parameters"] = function.get("parameters", function.get("input_schema"))
    return {"type": tool.get("type") or "function"} | {n: value for n, value in found.items() if value is not None}


def _stops(request: Json) -> list[str] | None:
    stops = request.get("stop_sequences", request.get("stop"))
    stops = [stops] if isinstance(stops, str) else stops
    return stops if isinstance(stops, list) and stops and all(isinstance(stop, str) for stop in stops) else None


def _reason(reason: Any) -> Any:
    return _REASONS.get(reason, reason) if isinstance(reason, str) else reason


def _response(call_id: Any, result: Any) -> Json:
    return {"type": "tool_call_response", "id": call_id, "response": result}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
