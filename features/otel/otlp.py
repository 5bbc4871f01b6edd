"""Converts OTLP over HTTP: exported traces to plain spans, and the answers that its exporters expect. Pure.

https://opentelemetry.io/docs/specs/otlp/#otlphttp. Protobuf is read here, one span at a time: its library refuses an
entire export for half a character in one of its spans.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import InvalidRequest, LightningError, UnsupportedMediaType
from ...core.json_text import dumps, loads_in_turns

Encoding = Literal["protobuf", "json"]
MEDIA = {"protobuf": "application/x-protobuf", "json": "application/json"}

# google.rpc.Code by the HTTP status; any other is UNKNOWN: 2.
_CODES = {400: 3, 401: 16, 403: 7, 413: 8, 415: 3, 429: 8, 501: 12, 503: 14}


@dataclass(frozen=True, slots=True)
class Span:
    """One span: ids in hexadecimal, times in Unix seconds, attributes with those of its resource.

    It does not end before it begins, whatever its clock did. `error`: what its status says, None where it did not fail.
    `parent_id`: empty for a trace's first span.
    `agent`: that it is part of, which it names itself, or else a span around it.
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
    if media not in MEDIA.values():
        raise UnsupportedMediaType(f"OTLP is sent as {' or '.join(MEDIA.values())}, got {media[:60]!r}")
    return "json" if media == MEDIA["json"] else "protobuf"


def read_spans(body: bytes, encoding: Encoding) -> tuple[list[Span], list[str]]:
    """Return an ExportTraceServiceRequest's spans, and the errors of those that cannot be read.

    Raise InvalidRequest for a body that is no such request.
    """
    try:
        # JSON may be long, and is read in a thread.
        export = (
            _message(body, _EXPORT) if encoding == "protobuf" else loads_in_turns(body.decode(errors="replace"), float)
        )
        resources = [*(export.get("resourceSpans") or ())]
    except Exception as error:  # whatever bytes from outside lead to
        raise InvalidRequest(f"the body is no ExportTraceServiceRequest as {encoding}: {error}") from None
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
                spans.append(_span(_message(span, _SPAN) if isinstance(span, bytes) else span, resource))
            except Exception as error:
                problems.append(f"a span cannot be read: {error!r:.200}")
    return spans, problems


def accepted(encoding: Encoding, rejected: int, why: str) -> bytes:
    """Return the answer to an export with `rejected` spans not taken. The exporter does not send them again."""
    if not rejected:
        return b"{}" if encoding == "json" else b""
    if encoding == "json":
        return dumps({"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": why}}).encode()
    partial_success = _number_and_text(rejected, why)
    return b"\x0a" + _varint(len(partial_success)) + partial_success


def refused(encoding: Encoding, error: LightningError) -> bytes:
    """Return the error as a google.rpc.Status, as OTLP wants it."""
    code = _CODES.get(error.status, 2)
    if encoding == "json":
        return dumps({"code": code, "message": error.message}).encode()
    return _number_and_text(code, error.message)


def _number_and_text(number: int, text: str) -> bytes:
    """The fields 1 and 2 of a message of protobuf."""
    raw = text.encode(errors="replace")
    return b"\x08" + _varint(number) + b"\x12" + _varint(len(raw)) + raw


def _span(span: Any, resource: dict[str, Any]) -> Span:
    status = span.get("status") or {}
    failed = status.get("code") in (2, "STATUS_CODE_ERROR")
    attributes = resource | _attributes(span.get("attributes"))
    for event in span.get("events") or ():
        if str(event.get("name")).startswith("gen_ai."):  # where some put the messages
            attributes |= _attributes(event.get("attributes"))
    began, ended = (int(span.get(name) or 0) / 1e9 for name in ("startTimeUnixNano", "endTimeUnixNano"))
    return Span(
        trace_id=str(span.get("traceId") or "").lower(),
        span_id=str(span.get("spanId") or "").lower(),
        name=_text(span.get("name") or ""),
        started_at=began or ended,
        ended_at=max(began, ended),
        error=(_text(status.get("message")) or "the span's status is an error") if failed else None,
        attributes=attributes,
        parent_id=str(span.get("parentSpanId") or "").lower(),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {_text(pair["key"]): _value(pair.get("value") or {}) for pair in pairs or ()}


def _value(value: Any) -> Any:
    for name, found in value.items():
        match name:
            case "stringValue":
                return _text(found)
            case "arrayValue":
                return [_value(one) for one in found.get("values") or ()]
            case "kvlistValue":
                return _attributes(found.get("values"))
            case "intValue":
                return int(found)
            case "doubleValue":
                return float(found)
            case "boolValue" | "bytesValue":
                return found
    return None


def _text(value: Any) -> str:
    """A text without halves of characters, which cannot be stored."""
    return str(value or "").encode(errors="replace").decode()


def _texted(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _time(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


# A message of protobuf: by the number of a field, its name in JSON and what reads it. A list: there are several.
_Shape = dict[int, tuple[str, Any]]
_VALUE: _Shape = {}
_PAIR: _Shape = {1: ("key", _texted), 2: ("value", _VALUE)}
_VALUE |= {
    1: ("stringValue", _texted),
    2: ("boolValue", bool),
    3: ("intValue", lambda number: number - 2**64 if number >= 2**63 else number),
    4: ("doubleValue", lambda raw: struct.unpack("<d", raw)[0]),
    5: ("arrayValue", {1: ("values", [_VALUE])}),
    6: ("kvlistValue", {1: ("values", [_PAIR])}),
    7: ("bytesValue", lambda raw: base64.b64encode(raw).decode()),
}
_SPAN: _Shape = {
    1: ("traceId", bytes.hex), 2: ("spanId", bytes.hex), 4: ("parentSpanId", bytes.hex), 5: ("name", _texted),
    7: ("startTimeUnixNano", _time), 8: ("endTimeUnixNano", _time), 9: ("attributes", [_PAIR]),
    11: ("events", [{2: ("name", _texted), 3: ("attributes", [_PAIR])}]),
    15: ("status", {2: ("message", _texted), 3: ("code", int)}),
}  # fmt: skip
# Spans are kept as bytes: each is read apart from all others.
_RESOURCE_SPANS: _Shape = {
    1: ("resource", {1: ("attributes", [_PAIR])}), 2: ("scopeSpans", [{2: ("spans", [bytes])}]),
}  # fmt: skip
_EXPORT: _Shape = {1: ("resourceSpans", [_RESOURCE_SPANS])}


def _message(data: bytes, shape: _Shape) -> dict[str, Any]:
    """A message of protobuf as OTLP's JSON has it. Raise ValueError, and others for fields of a wrong type."""
    found: dict[str, Any] = {}
    for number, raw in _fields(data):
        if number not in shape:
            continue
        name, kind = shape[number]
        of = kind[0] if isinstance(kind, list) else kind
        value = _message(raw, of) if isinstance(of, dict) else of(raw)
        if isinstance(kind, list):
            found.setdefault(name, []).append(value)
        else:
            found[name] = value
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The number and the value of each field: an integer, or bytes. https://protobuf.dev/programming-guides/encoding/"""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        value: Any
        if (kind := tag & 7) not in (0, 1, 2, 5):
            raise ValueError(f"a field of type {kind}")
        if kind in (0, 2):
            value, at = _read_varint(data, at)
        if kind:
            size = {1: 8, 5: 4}.get(kind) or value
            value, at = data[at : at + size], at + size
        if at > len(data):
            raise ValueError("it is cut off")
        yield tag >> 3, value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, and the place after it."""
    number = 0
    for shift, byte in enumerate(data[at : at + 10]):
        number |= (byte & 127) << 7 * shift
        if byte < 128:
            return number, at + shift + 1
    raise ValueError("it is cut off")


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes([number])
    return bytes([number & 127 | 128]) + _varint(number >> 7)
