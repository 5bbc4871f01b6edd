"""Stores a request as its difference from an earlier one: agents resend their whole history every turn. Pure.

A stored request is `{"same": [keys], "grown": {key: [kept, suffix]}, "new": {key: value}}`, relative to its parent's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from ..json_text import Number


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
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(is_same, a.values(), b.values()))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, Number):
        return bool(a.text == b.text)
    return bool(a == b) and (a != 0 or str(a) == str(b))  # 0.0 and -0.0


def same_prefix(a: list[Any], b: list[Any]) -> int:
    """Count the leading elements that are the same JSON in `a` and `b`."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (one, other) in pairs if not is_same(one, other)), min(len(a), len(b)))


def shrink_request(request: dict[str, Any], parent: dict[str, Any] | None) -> dict[str, Any]:
    """Return the stored form of `request`; `grow_request` with the same parent gives it back."""
    if parent is None:
        return {"new": request}
    same, grown, new = [], {}, {}
    for key, value in request.items():
        before = parent.get(key)
        kept = same_prefix(value, before) if isinstance(value, list) and isinstance(before, list) else 0
        if key in parent and is_same(value, before):
            same.append(key)
        elif kept:
            grown[key] = [kept, value[kept:]]
        else:
            new[key] = value
    return {"same": same, "grown": grown, "new": new}


def grow_request(stored: dict[str, Any], parent: dict[str, Any] | None) -> dict[str, Any]:
    """Return the request as the agent sent it (the order of its top-level keys apart)."""
    request = dict(stored["new"])
    for key in stored.get("same", ()):
        request[key] = (parent or {})[key]
    for key, (kept, suffix) in stored.get("grown", {}).items():
        request[key] = (parent or {})[key][:kept] + suffix
    return request


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
