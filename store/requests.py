"""Stores a request as its difference from an earlier one: agents resend their entire history every turn. Pure.

A stored request is `{"same": [keys], "grown": {key: [kept, suffix]}, "new": {key: value}}`, relative to its parent's.
It is read as a short call: `request_of: {"call_id": C, NAME: n, …}` says of each field NAME that it begins as the first
n of call C's full field: items of a list, characters (Unicode code points) of a text, members of an object. What the
request itself has in the field comes after that. `prompt_of: {"call_id": C, "tokens": n}` says that the prompt begins
with the first n of call C's tokens, prompt and answer. Without them, or where they are null, nothing is shared. C is an
earlier call of the same answer. `full_calls` gives each call all of both.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ..core.http import LARGE
from ..core.json_text import Number, encode, loads, loads_in_turns
from ..core.records import SAMPLING, ModelCall
from .database import Row

LONG_TEXT = 100  # characters from which on a text is shared with the parent's
LARGE_OBJECT = 1_000  # bytes of JSON, likewise
# `request_of` has this name itself, and `sampling` of a call shows these in full.
_NEVER_SHARED = {"call_id", *SAMPLING}
TOKEN_SIZE = 4  # bytes
PARENTS = 16  # calls of a rollout that are kept to read later ones

Json = dict[str, Any]


class Long(NamedTuple):
    """Stands for a list, text or object of so many items, characters or members."""

    kind: type
    size: int


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


def shrink_request(request: Json, parent: Json | None) -> Json:
    """Return the stored form of `request`, relative to its parent."""
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
    """How many leading items or characters a value shares with the one before."""
    if isinstance(value, list) and isinstance(before, list):
        return same_prefix(value, before)
    if not isinstance(value, str) or not isinstance(before, str):
        return 0
    shared = len(before)
    if not value.startswith(before):
        shared = bisect(range(1, shared + 1), False, key=lambda length: not value.startswith(before[:length]))
    return shared if shared >= LONG_TEXT else 0


def outline(request: Json) -> Json:
    """Return a request with a `Long` in the place of each value that a later request may share."""
    return {key: Long(type(value), len(value)) if _is_long(key, value) else value for key, value in request.items()}


def _is_long(key: str, value: Any) -> bool:
    if key in _NEVER_SHARED:
        return False
    if isinstance(value, str):
        return len(value) >= LONG_TEXT
    return isinstance(value, list) or (isinstance(value, dict) and len(encode(value)) >= LARGE_OBJECT)


def short_request(stored: Json, parent: Json) -> tuple[Json, dict[str, int], Json]:
    """Return a stored request's additions to its parent's, how much it shares by field, and its outline.

    `parent`: the parent's outline.
    """
    request, shared, outlined = dict(stored["new"]), {}, outline(stored["new"])
    for key in stored.get("same", ()):
        request[key] = outlined[key] = before = parent[key]
        if isinstance(before, Long):
            request[key], shared[key] = before.kind(), before.size
    for key, (kept, suffix) in stored.get("grown", {}).items():
        if isinstance(before := parent[key], Long):
            request[key], shared[key], outlined[key] = suffix, kept, Long(before.kind, kept + len(suffix))
        else:
            request[key] = outlined[key] = before[:kept] + suffix
    return request, shared, outlined


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as 32-bit integers, in the machine's byte order."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes | None) -> tuple[int, ...]:
    return tuple(array("i", data or b""))


class Parent(NamedTuple):
    """A call that was read before, as its children need it. `tokens`: of its prompt and answer, packed."""

    request: Json
    tokens: bytes


def newest_parents(known: Mapping[str, Parent], calls: Sequence[ModelCall]) -> dict[str, Parent]:
    """Return the parents to read later calls of a rollout against, with these calls added."""
    more = {call.call_id: Parent(call.request, pack_ids(call.row_token_ids)) for call in calls[-PARENTS:]}
    return dict([*{**known, **more}.items()][-PARENTS:])


def full_calls(calls: Iterable[Json], known: Mapping[str, Parent] | None = None, *, prompts: bool = True) -> list[Json]:
    """Return a rollout's short calls with full requests, which share their messages in memory.

    `known`: calls that were read before. Without `prompts` these stay short: all of them in full take much memory.
    """
    known = known or {}
    requests, found = {call_id: parent.request for call_id, parent in known.items()}, []
    tokens = dict[str, tuple[Any, Any]]()  # prompt, which is the call's own, and answer
    for call in calls:
        request = requests[call["call_id"]] = dict(call["request"])
        of = call.get("request_of") or {}
        for name in of.keys() - {"call_id"}:
            request[name] = begun(requests[of["call_id"]][name], of[name], request[name])
        full = call | {"request": request, "request_of": None}
        if prompts:
            prompt = call["prompt_token_ids"]
            if of := call.get("prompt_of"):
                before, answer = tokens.get(of["call_id"]) or (unpack_ids(known[of["call_id"]].tokens), ())
                prompt = (before + answer)[: of["tokens"]] + prompt
            tokens[call["call_id"]] = prompt, call["response_token_ids"]
            full |= {"prompt_token_ids": prompt, "prompt_of": None}
        found.append(full)
    return found


def begun(before: Any, shared: int, own: Any) -> Any:
    """Return the first so many of an earlier field, followed by this one."""
    return dict(islice(before.items(), shared)) | own if isinstance(before, dict) else before[:shared] + own


class ShortCalls:
    """Gives each call what its request and prompt add to its parent's, which was read before.

    All calls together take as much work and memory as the rollout has content.
    """

    def __init__(self, known: Mapping[str, Parent]) -> None:
        """`known`: calls that were read before, and may be parents of these."""
        self._outlines = {call_id: outline(parent.request) for call_id, parent in known.items()}
        self._sizes = {call_id: len(parent.tokens) // TOKEN_SIZE for call_id, parent in known.items()}

    def read(self, row: Row) -> Json:
        """Return the fields of a call that need its parent, with its id and the tokens of its answer."""
        call_id, parent_id, tokens = row["call_id"], row["parent_id"], row["prompt_shared"]
        before = self._outlines.get(parent_id, {})
        request, shared, self._outlines[call_id] = short_request(_stored_request(row), before)
        prompt, answer = unpack_ids(row["prompt_ids"]), unpack_ids(row["token_ids"])
        self._sizes[call_id] = tokens + len(prompt) + len(answer)
        return {
            "call_id": call_id,
            "request": request,
            "request_of": {"call_id": parent_id, **shared} if shared else None,
            "prompt_token_ids": prompt,
            "prompt_of": {"call_id": parent_id, "tokens": tokens} if tokens else None,
            "response_token_ids": answer,
            "extends": parent_id if 0 < tokens == self._sizes.get(parent_id) else None,
        }


def _stored_request(row: Row) -> Json:
    """Parse a stored request. One nested as deep as a parser allows is a level too deep in its stored form."""
    text = row["request"] or row["large_request"]
    try:
        stored: Json = loads(text) if len(text) < LARGE else loads_in_turns(text)
        return stored
    except ValueError:
        return {"new": loads(text.removeprefix('{"new":')[:-1])}
