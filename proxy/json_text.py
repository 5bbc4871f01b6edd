"""JSON text for the store: fast, and without loss for what UTF-8 cannot hold."""

from __future__ import annotations

import json
from typing import Any

import orjson


def dumps(value: Any) -> str:
    """JSON text. Lone surrogates and integers over 64 bits, which orjson refuses, go through the standard library."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return json.dumps(value)


def loads(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def dumps_or_none(value: Any) -> str | None:
    """None (SQL NULL) for None."""
    return None if value is None else dumps(value)


def loads_or_none(text: str | None) -> Any:
    return None if text is None else loads(text)
