"""Converts OTLP over HTTP: exported traces to plain spans, and the answers that its exporters expect. Pure.

https://opentelemetry.io/docs/specs/otlp/#otlphttp. `opentelemetry-proto` is imported when the first trace comes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InvalidRequest, LightningError, Unsupported, UnsupportedMediaType
from ..json_text import dumps, loads_in_turns
from .others import as_genai

Encoding = Literal["protobuf", "json"]
MEDIA = {"protobuf": "application/x-protobuf", "json": "application/json"}
MISSING = "OTLP needs opentelemetry-proto: pip install 'lightning-proxy[otel]'"

# google.rpc.Code by the HTTP status; any other is UNKNOWN.
_CODES = {400: 3, 401: 16, 403: 7, 413: 8, 415: 3, 429: 8, 501: 12, 503: 14}
_UNKNOWN = 2
_ERROR = 2  # a span's status


@dataclass(frozen=True, slots=True)
class Span:
    """One span: ids in hexadecimal, times in Unix seconds, attributes with those of its resource.

    `error`: what its status says, None where it did not fail. `parent_id`: empty for a trace's first span.
    `agent`: the name of the agent that it is part of, by the spans around it.
    """

    trace_id: str
    span_id: str
    name: str
    started_at: float
    ended_at: float
    error: str | None
    attributes: Mapping[str, Any]
    parent_id: str = ""
    agent: str | None = None


def encoding_of(content_type: str) -> Encoding:
    """Return the encoding that a Content-Type names; raises UnsupportedMediaType for another one."""
    media = content_type.partition(";")[0].strip().lower()
    for encoding, name in MEDIA.items():
        if media == name:
            return encoding  # type: ignore[return-value]
    raise UnsupportedMediaType(f"OTLP is sent as {' or '.join(MEDIA.values())}, got {media[:60]!r}")


def read_spans(body: bytes, encoding: Encoding) -> list[Span]:
    """Return an ExportTraceServiceRequest's spans. Raise InvalidRequest; Unsupported without opentelemetry-proto."""
    messages = _messages()
    found = messages.ExportTraceServiceRequest()
    try:
        if encoding == "protobuf":
            found.ParseFromString(body)
        else:
            _read_json(body, found)
    except Exception as error:  # DecodeError, ParseError, and whatever else bytes from outside lead to
        raise InvalidRequest(f"the body is no ExportTraceServiceRequest as {encoding}: {error}") from None
    return [
        _span(span, _attributes(resource.resource.attributes), encoding)
        for resource in found.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def accepted(encoding: Encoding, rejected: int, why: str) -> bytes:
    """Return the answer to an export with `rejected` spans not taken. The exporter does not send them again."""
    if encoding == "json":
        partial = {"rejectedSpans": str(rejected), "errorMessage": why} if rejected or why else None
        return dumps({"partialSuccess": partial} if partial else {}).encode()
    answer = _messages().ExportTraceServiceResponse()
    if rejected or why:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = why
    return bytes(answer.SerializeToString())


def refused(encoding: Encoding, error: LightningError) -> bytes:
    """Return the error as a google.rpc.Status, as OTLP wants it."""
    code = _CODES.get(error.status, _UNKNOWN)
    if encoding == "json":
        return dumps({"code": code, "message": error.message}).encode()
    text = error.message.encode(errors="replace")
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(text)) + text


def _messages() -> Any:
    try:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    except ImportError:
        raise Unsupported(MISSING) from None
    return trace_service_pb2


def _read_json(body: bytes, into: Any) -> None:
    """Read OTLP's JSON, which is protobuf's but for its hexadecimal ids: `_id` undoes that they are read as base64."""
    from google.protobuf import json_format

    read = loads_in_turns(body.decode(), float)  # it may be long, and is read in a thread
    json_format.ParseDict(read, into, ignore_unknown_fields=True, max_recursion_depth=100)


def _span(span: Any, resource: dict[str, Any], encoding: Encoding) -> Span:
    failed = span.status.code == _ERROR
    attributes = resource | _attributes(span.attributes)
    for event in span.events:
        if event.name.startswith("gen_ai."):  # where some put the messages
            attributes |= _attributes(event.attributes)
    return Span(
        trace_id=_id(span.trace_id, encoding),
        span_id=_id(span.span_id, encoding),
        name=span.name,
        started_at=span.start_time_unix_nano / 1e9,
        ended_at=span.end_time_unix_nano / 1e9,
        error=(span.status.message or "the span's status is an error") if failed else None,
        attributes=as_genai(attributes),
        parent_id=_id(span.parent_span_id, encoding),
    )


def _id(raw: bytes, encoding: Encoding) -> str:
    return raw.hex() if encoding == "protobuf" else base64.b64encode(raw).decode().lower()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return None
        case "array_value":
            return [_value(one) for one in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
