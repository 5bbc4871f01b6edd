"""Reads and writes JSON text: fast, and without loss where UTF-8 cannot hold a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import orjson

# A number with a fraction or an exponent, or, now and then, something like it in a string.
_FLOAT = re.compile(rb"[:,\[]-?\d+[.eE]")
# Possessive: a name may be megabytes long, and backtracking would take minutes.
_NAMED_MODEL = re.compile(rb'"model"\s*+:\s*+("(?:[^"\\]++|\\.)*+")')
_ESCAPED_LETTER = re.compile(rb"\\u00[67]")


def encode_as_vllm(body: Any) -> bytes:
    """Encode JSON as vLLM's own server does. orjson writes other digits for some floats."""
    try:
        fast = orjson.dumps(body)
    except orjson.JSONEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() if _FLOAT.search(fast) else fast


def as_utf8(text: bytes) -> bytes:
    """Turn JSON in UTF-16, UTF-32 or with a byte order mark, all of which vLLM reads, into plain UTF-8."""
    encoding = json.detect_encoding(text)
    try:
        return text if encoding == "utf-8" else text.decode(encoding).encode()
    except UnicodeError:
        return text


def with_model(text: bytes, model: str) -> tuple[bytes | memoryview, ...] | None:
    """Return the text of a request with another model's name, and nothing else changed, in pieces.

    None if the name cannot be found for certain: `"model"` occurs twice, or may be written in escapes. Also None for a
    text with a byte order mark, which not all servers read.
    """
    found = _NAMED_MODEL.search(text)
    plain = text.count(b'"model"') == 1 and not _ESCAPED_LETTER.search(text) and not text.startswith(codecs.BOM_UTF8)
    if found is None or not plain:
        return None
    view = memoryview(text)
    return view[: found.start(1)], orjson.dumps(model), view[found.end(1) :]


def encode(value: Any) -> bytes:
    """Encode a value as JSON. The standard library does what orjson refuses: lone surrogates, integers over 64 bits."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def dumps(value: Any) -> str:
    """Encode a value as JSON text."""
    return encode(value).decode()


def loads(text: str | bytes) -> Any:
    """Decode a JSON text; raises ValueError if it is not JSON. The standard library reads lone surrogates."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text if isinstance(text, str) else text.decode(), parse_constant=_refuse)
        except RecursionError:
            raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def loads_in_turns(text: str | bytes, constant: Callable[[str], Any] = _refuse) -> Any:
    """Decode a JSON text as `loads` does, in a thread: it lets other threads have their turns meanwhile.

    orjson's parser keeps all others waiting. The standard library's comes back to Python for what a long text has many
    of, objects and numbers, because it is given functions for them. `constant`: for NaN and the infinities.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(text, object_hook=_itself, parse_int=_int, parse_float=_float, parse_constant=constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _itself(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)


def encode_in_turns(value: dict[str, Any]) -> bytes:
    """Encode an object whose lists may be long as `encode` does, in a thread: one item of a list at a time."""
    return b"".join(_pieces(value))


def encoded_parts(value: dict[str, Any], size: int = 2**18) -> Iterator[bytes]:
    """Yield what `encode_in_turns` returns in parts of at least `size` bytes: a whole of many is copied in one go."""
    part = bytearray()
    for piece in _pieces(value):
        part += piece
        if len(part) >= size:
            yield bytes(part)
            part.clear()
    yield bytes(part)


def _pieces(value: dict[str, Any]) -> Iterator[bytes]:
    yield b"{"
    for i, (name, part) in enumerate(value.items()):
        yield b"," * (i > 0) + encode(name) + b":"
        if not isinstance(part, list):
            yield encode(part)
            continue
        yield b"["
        for n, item in enumerate(part):
            yield b"," * (n > 0)
            yield encode(item)
        yield b"]"
    yield b"}"


def dumps_or_none(value: Any) -> str | None:
    """Encode a value as JSON text; None stays None (SQL NULL)."""
    return None if value is None else dumps(value)


def loads_or_none(text: str | None) -> Any:
    return None if text is None else loads(text)
