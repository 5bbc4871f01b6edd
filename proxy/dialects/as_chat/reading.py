"""Reads the fields of a request as strictly as its own route would, so that requests that it refuses are sent to it."""

from __future__ import annotations

from typing import Any

from .translation import Untranslatable

Json = dict[str, Any]

_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "true or false": (bool,),
    "an integer": (int,),
    "a number": (int, float),
    "an object": (dict,),
    "a list": (list,),
    "text or a list": (str, list),
}


def optional(part: Json, name: str, kind: str) -> Any:
    """Return a field, None if it is absent; raise Untranslatable if it is not of its kind."""
    value = part.get(name)
    if value is None or _is(value, kind):
        return value
    raise Untranslatable(f"`{name}` is not {kind}")


def required(part: Json, name: str, kind: str) -> Any:
    """Return a field; raise Untranslatable if it is absent or not of its kind."""
    value = optional(part, name, kind)
    if value is None:
        raise Untranslatable(f"`{name}` is missing")
    return value


def objects(values: Any, what: str) -> list[Json]:
    """Return a list of objects; raise Untranslatable if it is none."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Untranslatable(f"{what} are not objects in a list")
    return values


def _is(value: Any, kind: str) -> bool:
    # JSON's true is no number, Python's is.
    return isinstance(value, _KINDS[kind]) and (kind == "true or false" or not isinstance(value, bool))
