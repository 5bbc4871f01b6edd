"""Reads and writes JSON text fast, and loses neither lone surrogates nor digits that a float cannot hold."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from decimal import Decimal
from typing import Any, Self

import orjson

# A number with a fraction or an exponent, or, now and then, something like it in a string.
_FLOAT = re.compile(rb"[:,\[]-?\d+[.eE]")
# Possessive: a name may be megabytes long, and backtracking would take minutes.
_NAMED_MODEL = re.compile(rb'"model"\s*+:\s*+("(?:[^"\\]++|\\.)*+")')
_ESCAPED_LETTER = re.compile(rb"\\u00[67]")
# What numbers are in a text: digits and points become 0, an exponent's sign e, all but minus signs a blank.
_DIGITS = bytes(
    ord("0" if sign in "0123456789." else "e" if sign in "eE" else "-" if sign == "-" else " ")
    for sign in map(chr, range(256))
)
# A float is sure to hold 15 digits, not more. Shorter numbers are not looked at. Every fourth byte of the text tells
# whether there may be a longer one.
_LONG = 17
_LONG_NUMBER, _POSITIVE, _NEGATIVE = b"0" * _LONG, b" " + b"0" * _LONG, b"-" + b"0" * _LONG
# vLLM writes as many digits as are needed to read the same float again: 17 at most.
_LOGPROB = re.compile(rb'logprobs?": ?\[?-(?=[0-9.]{17})[0-9]{1,2}\.0{0,5}[0-9]{1,17}(?![0-9])')
_TINY = re.compile(rb"-(?<=[0-9][eE]-)[0-9]{3}")  # begins with the sign, which is quickly found
_MOST_DIGITS = 4300  # of an integer that Python reads


class Number(float):
    """A number that no Python float or integer holds exactly. It keeps its original text, which is written back."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[Number], tuple[str]]:
        return Number, (self.text,)

    def __repr__(self) -> str:
        return self.text


def encode_as_vllm(body: Any) -> bytes:
    """Encode JSON as vLLM's own server does. orjson alone would write some floats with other digits."""
    try:
        fast = orjson.dumps(body)
    except orjson.JSONEncodeError:
        return _written(body, ascii_only=True).encode()
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() if _FLOAT.search(fast) else fast


def as_utf8(text: bytes) -> bytes:
    """Convert a JSON text to UTF-8 without a byte order mark. A text that cannot be decoded is returned unchanged."""
    encoding = "utf-8" if text.startswith(b'{"') else json.detect_encoding(text)
    try:
        return text if encoding == "utf-8" else text.decode(encoding).encode()
    except UnicodeError:
        return text


def with_model(text: bytes, model: str) -> tuple[bytes | memoryview, ...] | None:
    """Return the text of a request, in pieces, with another model's name and nothing else changed.

    None if the name cannot be found for certain: `"model"` is missing, occurs twice, or may be escaped. Also None if
    the text has a byte order mark, which some servers cannot read.
    """
    found = _NAMED_MODEL.search(text)
    plain = text.count(b'"model"') == 1 and not _ESCAPED_LETTER.search(text) and not text.startswith(codecs.BOM_UTF8)
    if found is None or not plain:
        return None
    view = memoryview(text)
    return view[: found.start(1)], orjson.dumps(model), view[found.end(1) :]


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name. Unlike `asdict`, it does not copy values, which may be megabytes."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def encode(value: Any) -> bytes:
    """Encode a value or record as JSON, including what orjson refuses: lone surrogates, integers over 64 bits."""
    try:
        return orjson.dumps(value, default=_fragment)
    except orjson.JSONEncodeError:
        return _written(value, ascii_only=True).encode()


def _fragment(value: Any) -> orjson.Fragment:
    if isinstance(value, Number):
        return orjson.Fragment(value.text)
    raise TypeError


def dumps_readable(value: Any, encoding: str = "utf-8") -> str:
    """Write any value as JSON for people, with spaces between its parts. Never fails.

    If the encoding lacks a character, as UTF-8 lacks lone surrogates, everything but ASCII is escaped. NaN and
    infinities become null, and values without a JSON form become text.
    """
    text = _written(value, readable=True)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = _written(value, ascii_only=True, readable=True)
    return text


class _Ready(str):
    """A piece of JSON that is already written."""


def _written(value: Any, *, ascii_only: bool = False, readable: bool = False) -> str:
    """The JSON of a value, however deep, as the standard library writes it. A `Number` keeps its text.

    `readable`: with spaces, and with values that have no JSON form as text; otherwise these raise TypeError.
    """
    comma, colon = (", ", ": ") if readable else (",", ":")
    encoder = json.JSONEncoder(ensure_ascii=ascii_only, default=str if readable else None)
    pieces: list[str] = []
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, _Ready):
            pieces.append(value)
        elif isinstance(value, Number):
            pieces.append(value.text)
        elif is_dataclass(value):
            left.append(fields_of(value))
        elif isinstance(value, dict) and value:
            left.append(_Ready("}"))
            names = [_Ready(f"{comma}{encoder.encode(str(name))}{colon}") for name in value]
            names[0] = _Ready("{" + names[0].removeprefix(comma))
            left += [part for pair in zip(reversed(value.values()), reversed(names), strict=True) for part in pair]
        elif isinstance(value, list | tuple) and value:
            left.append(_Ready("]"))
            left += [part for item in reversed(value) for part in (item, _Ready(comma))]
            left[-1] = _Ready("[")
        elif readable and isinstance(value, float) and not math.isfinite(value):
            pieces.append("null")
        else:
            pieces.append(encoder.encode(value))
    return "".join(pieces)


def dumps(value: Any) -> str:
    """Encode a value as JSON text."""
    return encode(value).decode()


def loads(text: str | bytes) -> Any:
    """Decode a JSON text. Raises ValueError if it is invalid. Numbers that no float or integer holds become `Number`.

    Texts that may have such numbers, or that orjson refuses (lone surrogates), go to the standard library's parser.
    """
    try:
        raw = text if isinstance(text, bytes) else text.encode()
        if not _has_long_numbers(raw):
            return orjson.loads(raw)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        pass
    return loads_in_turns(text)


def loads_rounded(text: str | bytes) -> Any:
    """Decode a JSON text as `loads` does, but faster: long numbers may be rounded to floats."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return loads(text)


def _has_long_numbers(text: bytes) -> bool:
    """Whether a float might round a number in the text."""
    if b"0000" in text[::4].translate(_DIGITS) and _LONG_NUMBER in (digits := text.translate(_DIGITS)):
        positive = _POSITIVE in digits or digits.startswith(_LONG_NUMBER)
        if positive or digits.count(_NEGATIVE) > len(_LOGPROB.findall(text)):
            return True
    return b"-" in text and _TINY.search(text) is not None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def loads_in_turns(text: str | bytes, constant: Callable[[str], Any] = _refuse) -> Any:
    """Decode a JSON text as `loads` does. If called in a thread, let other threads run meanwhile.

    orjson's parser keeps the other threads waiting. The standard library's parser returns to Python for every object
    and number, because it is given functions for them. `constant` is called for NaN and infinities.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(
            text,
            object_hook=lambda value: value,
            parse_int=lambda digits: int(digits) if len(digits) < _MOST_DIGITS else Number(digits),
            parse_float=_float,
            parse_constant=constant,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _float(digits: str) -> float:
    """The number as a float if that is exact, otherwise as a Number."""
    number = float(digits)
    if len(digits) < _LONG and "e" not in digits.lower():
        return number
    with suppress(ArithmeticError):  # an exponent that no Decimal has
        if len(digits) < 400 and Decimal(repr(number)) == Decimal(digits):
            return number
    return Number(digits)


def encoded_parts(value: Any, size: int = 2**18) -> Iterator[bytes]:
    """Yield the JSON of a value in parts: lists in an object are encoded one item at a time.

    Other threads can run between two parts. All parts except the last have at least `size` bytes.
    """
    value = fields_of(value) if is_dataclass(value) else value
    if not isinstance(value, dict):
        yield encode(value)
        return
    part = bytearray(b"{")
    for i, (name, field) in enumerate(value.items()):
        part += b"," * (i > 0) + encode(name) + b":"
        if not isinstance(field, list):
            part += encode(field)
            continue
        part += b"["
        for n, item in enumerate(field):
            part += b"," * (n > 0) + encode(item)
            if len(part) >= size:
                yield bytes(part)
                part.clear()
        part += b"]"
    yield bytes(part + b"}")


def dumps_or_none(value: Any) -> str | None:
    """Encode a value as JSON text; None stays None (SQL NULL)."""
    return None if value is None else dumps(value)


def loads_or_none(text: str | None) -> Any:
    return None if text is None else loads(text)
