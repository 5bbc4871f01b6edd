"""Decodes OTLP requests over HTTP, and encodes their answers (https://opentelemetry.io/docs/specs/otlp/#otlphttp)."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.json_format import MessageToDict, MessageToJson
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from ...core.errors import InvalidRequest, LightningError, UnsupportedMediaType
from ...core.json_text import loads_in_turns

Encoding = Literal["protobuf", "json"]
MEDIA = {"protobuf": "application/x-protobuf", "json": "application/json"}

# google.rpc.Code by the HTTP status; any other is UNKNOWN: 2.
_CODES = {400: 3, 401: 16, 403: 7, 413: 8, 415: 3, 429: 8, 501: 12, 503: 14}
# Half of a surrogate pair, which JavaScript exporters send. Protobuf refuses an entire export that has one.
_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


@dataclass(frozen=True, slots=True)
class Span:
    """A span with hexadecimal ids and Unix times. `attributes` include those of its resource and its GenAI events."""

    trace_id: str
    span_id: str
    started_at: float
    ended_at: float
    error: str | None
    attributes: Mapping[str, Any]
    parent_id: str = ""
    agent: str | None = None


def encoding_of(content_type: str) -> Encoding:
    """Return the encoding that a Content-Type names. Raises UnsupportedMediaType for others."""
    media = content_type.partition(";")[0].strip().lower()
    if media not in MEDIA.values():
        raise UnsupportedMediaType(f"OTLP must be sent as {' or '.join(MEDIA.values())}, got {media[:60]!r}")
    return "json" if media == MEDIA["json"] else "protobuf"


def read_spans(body: bytes, encoding: Encoding) -> tuple[list[Span], list[str]]:
    """Return an export's spans, and an error for each unreadable part. Raises InvalidRequest for any other body."""
    try:
        resources = [*(_export(body, encoding).get("resourceSpans") or ())]
    except Exception as error:  # whatever bytes from outside lead to
        raise InvalidRequest(f"the body is not an ExportTraceServiceRequest in {encoding}: {error}") from None
    spans: list[Span] = []
    problems: list[str] = []
    for one in resources:
        try:
            resource = _attributes((one.get("resource") or {}).get("attributes"))
            told = [span for scope in one.get("scopeSpans") or () for span in scope.get("spans") or ()]
        except Exception as error:
            problems.append(f"a resource cannot be read: {error!r:.200}")
            continue
        for span in told:
            try:
                spans.append(_span(span, resource, encoding))
            except Exception as error:
                problems.append(f"a span cannot be read: {error!r:.200}")
    return spans, problems


def accepted(encoding: Encoding, rejected: int, why: str) -> bytes:
    """Return the answer to an accepted export. It tells how many spans were rejected, and why."""
    problem = ExportTracePartialSuccess(rejected_spans=rejected, error_message=_text(why)) if rejected else None
    return _encoded(ExportTraceServiceResponse(partial_success=problem), encoding)


def refused(encoding: Encoding, error: LightningError) -> bytes:
    """Return the error as a google.rpc.Status, as OTLP requires."""
    return _encoded(Status(code=_CODES.get(error.status, 2), message=_text(error.message)), encoding)


def _encoded(message: Message, encoding: Encoding) -> bytes:
    return message.SerializeToString() if encoding == "protobuf" else MessageToJson(message, indent=None).encode()


def _export(body: bytes, encoding: Encoding) -> Any:
    """The export in OTLP's JSON form, but with base64 ids if it came as protobuf."""
    if encoding == "json":
        return loads_in_turns(body.decode(errors="replace"), float)
    try:
        return MessageToDict(ExportTraceServiceRequest.FromString(body))
    except DecodeError:
        return MessageToDict(ExportTraceServiceRequest.FromString(_HALF.sub(b"???", body)))


def _span(span: Any, resource: dict[str, Any], encoding: Encoding) -> Span:
    status = span.get("status") or {}
    failed = status.get("code") in (2, "STATUS_CODE_ERROR")
    attributes = resource | _attributes(span.get("attributes"))
    for event in span.get("events") or ():
        if str(event.get("name")).startswith("gen_ai."):  # where some put the messages
            attributes |= _attributes(event.get("attributes"))
    began, ended = (int(span.get(name) or 0) / 1e9 for name in ("startTimeUnixNano", "endTimeUnixNano"))
    ids = [str(span.get(name) or "") for name in ("traceId", "spanId", "parentSpanId")]
    is_hex = encoding == "json"
    trace_id, span_id, parent_id = (one.lower() if is_hex else base64.b64decode(one).hex() for one in ids)
    error = (_text(status.get("message")) or "the span's status is an error") if failed else None
    return Span(trace_id, span_id, began or ended, max(began, ended), error, attributes, parent_id)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {_text(pair.get("key")): _value(pair.get("value") or {}) for pair in pairs or ()}


def _value(value: Any) -> Any:
    return next((read(value[kind]) for kind, read in _VALUES.items() if kind in value), None)


def _text(value: Any) -> str:
    """The text without lone surrogates, which cannot be stored."""
    return str(value or "").encode(errors="replace").decode()


_VALUES: dict[str, Callable[[Any], Any]] = {
    "stringValue": _text,
    "arrayValue": lambda found: [_value(one) for one in found.get("values") or ()],
    "kvlistValue": lambda found: _attributes(found.get("values")),
    "intValue": int,
    "doubleValue": float,
    "boolValue": bool,
    "bytesValue": str,
}
