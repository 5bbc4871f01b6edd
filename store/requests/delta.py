"""Stores a request as its difference from an earlier one: agents resend their entire history every turn. Pure.

A stored request is `{"same": [keys], "grown": {key: [kept, suffix]}, "new": {key: value}}`, relative to its parent's.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...core.json_text import Number, encode
from ...core.records import SAMPLING

LONG_TEXT = 100  # characters from which on a text is shared with the parent's
LARGE_OBJECT = 1_000  # bytes of JSON, likewise
# `request_of` has this name itself, and `sampling` of a call shows these in full.
_NEVER_SHARED = {"call_id", *SAMPLING}


class Long(NamedTuple):
    """Stands for a list, text or object of so many items, characters or members."""

    kind: type
    size: int


Outline = dict[str, Any]  # a request with a Long in the place of each value that a later request may share


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Count the leading elements that `a` and `b` share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the usual case, at the speed of one comparison
        return length
    return next(i for i in range(length) if a[i] != b[i])


def is_same(a: Any, b: Any) -> bool:
    """Compare values as JSON texts: Python takes True, 1 and 1.0 for equal, and an object's names in any order."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, str):
        return bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(is_same, a.values(), b.values()))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, Number):
        return bool(a.text == b.text)
    return bool(a == b) and (a != 0 or str(a) == str(b))  # 0.0 and -0.0


def same_prefix(a: list[Any], b: list[Any]) -> int:
    """Count the leading elements that are the same JSON in `a` and `b`."""
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if one is not other and not is_same(one, other):
            return i
    return min(len(a), len(b))


def same_text(a: str, b: str) -> int:
    """Count the leading characters that `a` and `b` share; 0 if they are few."""
    if a.startswith(b):
        shared = len(b)
    else:
        shared = bisect(range(1, len(b) + 1), False, key=lambda length: not a.startswith(b[:length]))
    return shared if shared >= LONG_TEXT else 0


def shrink_request(request: dict[str, Any], parent: dict[str, Any] | None) -> dict[str, Any]:
    """Return the stored form of `request`; `grow_request` with the same parent gives it back."""
    if parent is None:
        return {"new": request}
    same, grown, new = [], {}, {}
    for key, value in request.items():
        before = parent.get(key)
        if key in parent and is_same(value, before):
            same.append(key)
        elif kept := _kept(value, before):
            grown[key] = [kept, value[kept:]]
        else:
            new[key] = value
    return {"same": same, "grown": grown, "new": new}


def _kept(value: Any, before: Any) -> int:
    if isinstance(value, list) and isinstance(before, list):
        return same_prefix(value, before)
    return same_text(value, before) if isinstance(value, str) and isinstance(before, str) else 0


def grow_request(stored: dict[str, Any], parent: dict[str, Any] | None) -> dict[str, Any]:
    """Return the request as the agent sent it (the order of its top-level keys apart)."""
    request = dict(stored["new"])
    for key in stored.get("same", ()):
        request[key] = (parent or {})[key]
    for key, (kept, suffix) in stored.get("grown", {}).items():
        request[key] = (parent or {})[key][:kept] + suffix
    return request


def short_request(stored: dict[str, Any], parent: Outline | None) -> tuple[dict[str, Any], dict[str, int], Outline]:
    """Return a stored request's additions to its parent's, how much it shares by field, and its outline.

    No full request is made of it: `store/requests/full.py` does that.
    """
    request, shared, outline = {}, {}, {}
    for key in stored.get("same", ()):
        request[key] = outline[key] = before = (parent or {})[key]
        if isinstance(before, Long):
            request[key], shared[key] = before.kind(), before.size
    for key, (kept, suffix) in stored.get("grown", {}).items():
        before = (parent or {})[key]
        if isinstance(before, Long):
            request[key], shared[key], outline[key] = suffix, kept, Long(before.kind, kept + len(suffix))
        else:
            request[key] = outline[key] = before[:kept] + suffix
    for key, value in stored["new"].items():
        request[key] = value
        outline[key] = Long(type(value), len(value)) if _is_long(key, value) else value
    return request, shared, outline


def _is_long(key: str, value: Any) -> bool:
    if key in _NEVER_SHARED:
        return False
    if isinstance(value, str):
        return len(value) >= LONG_TEXT
    return isinstance(value, list) or (isinstance(value, dict) and len(encode(value)) >= LARGE_OBJECT)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as 32-bit integers, in the machine's byte order."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes | None) -> tuple[int, ...]:
    return tuple(array("i", data or b""))


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack log-probabilities as 32-bit floats, which the server computed them in."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes | None) -> tuple[float, ...]:
    return tuple(array("f", data or b""))
