"""JSON text: fast, and without loss for what UTF-8 cannot hold."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import orjson

# A number that is no integer; now and then something in a string that looks like one.
_FLOAT = re.compile(rb"[:,\[]-?\d+[.eE]")
# Nothing to come back to: the name may be megabytes long.
_NAMED_MODEL = re.compile(rb'"model"\s*+:\s*+("(?:[^"\\]++|\\.)*+")')
_ESCAPED_LETTER = re.compile(rb"\\u00[67]")


def encode_as_vllm(body: Any) -> bytes:
    """JSON as vLLM's own server encodes it, down to the digits of a float, where orjson differs."""
    try:
        fast = orjson.dumps(body)
    except orjson.JSONEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() if _FLOAT.search(fast) else fast


def as_utf8(text: bytes) -> bytes:
    """JSON without a byte order mark, and not in UTF-16 or 32: servers in Python, vLLM's too, read them all."""
    encoding = json.detect_encoding(text)
    try:
        return text if encoding == "utf-8" else text.decode(encoding).encode()
    except UnicodeError:
        return text


def with_model(text: bytes, model: str) -> bytes | None:
    """The text of an object that names a model, with another one's name and nothing else changed.

    None where it is not seen at once which name that is: `"model"` stands there twice, or perhaps in escapes; and for a
    text with a byte order mark, which not all servers read.
    """
    found = _NAMED_MODEL.search(text)
    plain = text.count(b'"model"') == 1 and not _ESCAPED_LETTER.search(text) and not text.startswith(codecs.BOM_UTF8)
    if found is None or not plain:
        return None
    return b"".join((text[: found.start(1)], orjson.dumps(model), text[found.end(1) :]))


def encode(value: Any) -> bytes:
    """JSON. Lone surrogates and integers over 64 bits, which orjson refuses, go through the standard library."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def dumps(value: Any) -> str:
    """The same as text."""
    return encode(value).decode()


def loads(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError if it is none. Lone surrogates are read by the standard library."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text if isinstance(text, str) else text.decode(), parse_constant=_refuse)
        except RecursionError:
            raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def dumps_or_none(value: Any) -> str | None:
    """None (SQL NULL) for None."""
    return None if value is None else dumps(value)


def loads_or_none(text: str | None) -> Any:
    return None if text is None else loads(text)
