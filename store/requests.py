"""Stores a request as its difference from an earlier one: agents resend their entire history every turn. Pure.

A stored request is `{"same": [keys], "grown": {key: [kept, suffix]}, "new": {key: value}}`, relative to its parent's.
The control API gives a short call: `request_of: {"call_id": C, NAME: n, …}` says of each field NAME that it begins as
the first n of call C's full field: items of a list, characters (Unicode code points) of a text, members of an object.
What the request itself has in the field comes after that. `prompt_of: {"call_id": C, "tokens": n}` says that the
prompt begins with the first n of call C's tokens, prompt and answer. Without them, or where they are null, nothing is
shared. C is an earlier call of the same answer.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ..core.http import LARGE
from ..core.json_text import Number, encode, loads, loads_in_turns
from ..core.records import SAMPLING
from .database import Row

LONG_TEXT = 100  # characters from which on a text is shared with the parent's
LARGE_OBJECT = 1_000  # bytes of JSON, likewise
# `request_of` has this name itself, and `sampling` of a call shows these in full.
_NEVER_SHARED = {"call_id", *SAMPLING}
TOKEN_SIZE = 4  # bytes

Json = dict[str, Any]
Outline = dict[str, Any]  # a request with a Long in the place of each value that a later request may share


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

    No full request is made of it: `FullParts` does that.
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


def full_calls(calls: Iterable[Json], *, prompts: bool = True) -> list[Json]:
    """Return a rollout's short calls with full requests, which share their messages in memory.

    Without `prompts` these stay short: all of them in full take much memory.
    """
    requests, tokens, found = dict[str, Json](), dict[str, list[int]](), []
    for call in calls:
        request = requests[call["call_id"]] = dict(call["request"])
        of = call.get("request_of") or {}
        for name in of.keys() - {"call_id"}:
            request[name] = begun(requests[of["call_id"]][name], of[name], request[name])
        full = call | {"request": request, "request_of": None}
        if prompts:
            of = call.get("prompt_of")
            prompt = [*(tokens[of["call_id"]][: of["tokens"]] if of else ()), *call["prompt_token_ids"]]
            tokens[call["call_id"]] = [*prompt, *call["response_token_ids"]]
            full |= {"prompt_token_ids": prompt, "prompt_of": None}
        found.append(full)
    return found


def begun(before: Any, shared: int, own: Any) -> Any:
    """Return the first so many of an earlier field, followed by this one."""
    return dict(islice(before.items(), shared)) | own if isinstance(before, dict) else before[:shared] + own


class Parent(NamedTuple):
    """A call that was read before, as its children need it. `tokens`: of its prompt and answer, packed."""

    request: dict[str, Any]
    tokens: bytes


class FullParts:
    """Gives each call its full request and prompt. Requests share their messages, so they take little memory."""

    def __init__(self, known: Mapping[str, Parent]) -> None:
        """`known`: calls that were read before, and may be parents of these."""
        self._known = known
        self._requests = {call_id: parent.request for call_id, parent in known.items()}
        self._rows = _Rows()
        self._tokens: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # prompt, which is the call's, and answer

    def of(self, row: Row) -> dict[str, Any]:
        """Return the fields of ModelCall that need the call's parent. It was read before."""
        call_id, parent = row["call_id"], row["parent_id"]
        request = grow_request(_stored_request(row), self._requests.get(parent))
        if parent in self._known and parent not in self._tokens:
            self._tokens[parent] = unpack_ids(self._known[parent].tokens), ()
        parent_prompt, parent_answer = self._tokens.get(parent, ((), ()))
        prompt = (parent_prompt + parent_answer)[: row["prompt_shared"]] + unpack_ids(row["prompt_ids"])
        self._requests[call_id], self._tokens[call_id] = request, (prompt, unpack_ids(row["token_ids"]))
        return {
            "request": request,
            "request_of": None,
            "prompt_token_ids": prompt,
            "prompt_of": None,
            "extends": self._rows.extended_by(row),
        }


class ShortParts:
    """Gives each call the additions of its request and prompt to its parent's."""

    def __init__(self) -> None:
        self._outlines: dict[str, Outline] = {}
        self._rows = _Rows()

    def of(self, row: Row) -> dict[str, Any]:
        """Return the fields of ModelCall that need the call's parent. It was read before."""
        call_id, parent, tokens = row["call_id"], row["parent_id"], row["prompt_shared"]
        request, shared, self._outlines[call_id] = short_request(_stored_request(row), self._outlines.get(parent))
        return {
            "request": request,
            "request_of": {"call_id": parent, **shared} if shared else None,
            "prompt_token_ids": unpack_ids(row["prompt_ids"]),
            "prompt_of": {"call_id": parent, "tokens": tokens} if tokens else None,
            "extends": self._rows.extended_by(row),
        }


class _Tokens(NamedTuple):
    """The tokens of a call as bytes: so many of its parent's, the rest of its prompt, its answer."""

    parent: Any  # a _Tokens, or None
    shared: int
    own: bytes
    answer: bytes

    @property
    def prompt_size(self) -> int:
        return self.shared + len(self.own)

    @property
    def size(self) -> int:
        return self.prompt_size + len(self.answer)

    def first(self, size: int) -> bytes:
        """Return so many bytes from the beginning."""
        parts, tokens = [], self
        while tokens is not None and size > 0:
            parts.append(tokens.answer[: max(0, size - tokens.prompt_size)])
            parts.append(tokens.own[: max(0, size - tokens.shared)])
            size = min(size, tokens.shared)
            tokens = tokens.parent
        return b"".join(reversed(parts))


class _Rows:
    """Finds the call whose tokens, prompt and answer, a prompt begins with. What prompts share is kept once."""

    def __init__(self) -> None:
        self._tokens: dict[str, _Tokens] = {}

    def extended_by(self, row: Row) -> str | None:
        """Return the call that this call's prompt extends: usually the parent, else the newest such call."""
        parent_id, parent = row["parent_id"], self._tokens.get(row["parent_id"])
        shared = TOKEN_SIZE * row["prompt_shared"] if parent else 0
        tokens = _Tokens(parent, shared, row["prompt_ids"] or b"", row["token_ids"] or b"")
        extends_parent = parent is not None and 0 < parent.size == shared
        found = parent_id if extends_parent else self._newest_in(tokens)
        if row["token_ids"] is not None:  # it was answered
            self._tokens[row["call_id"]] = tokens
        return found

    def _newest_in(self, tokens: _Tokens) -> str | None:
        """The newest call whose tokens the prompt begins with. Answers are compared first: most differ there."""
        prompt = tokens.first(tokens.prompt_size)
        for call_id, earlier in reversed(self._tokens.items()):
            answer = prompt[earlier.prompt_size : earlier.size]
            may = 0 < earlier.size <= len(prompt) and answer == earlier.answer
            if may and prompt.startswith(earlier.first(earlier.prompt_size)):
                return call_id
        return None


def _stored_request(row: Row) -> dict[str, Any]:
    """Parse a stored request. One nested as deep as a parser allows is a level too deep in its stored form."""
    text = row["request"] or row["large_request"]
    try:
        stored: dict[str, Any] = loads(text) if len(text) < LARGE else loads_in_turns(text)
        return stored
    except ValueError:
        return {"new": loads(text.removeprefix('{"new":')[:-1])}
