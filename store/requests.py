"""Stores a request as its difference from an earlier one, because agents resend their whole history. Pure.

A stored request is `{"new": {NAME: value, …}, "shared": {NAME: n, …}}`: a field in `shared` begins with the first n
items of its parent's full field (list items, Unicode code points, or object members); its value in `new` follows.
Example, a second turn:

    parent   {"messages": [m1], "tools": [t], "model": "m"}
    request  {"messages": [m1, a1, m2], "tools": [t], "model": "m"}
    stored   {"new": {"messages": [a1, m2], "tools": [], "model": "m"}, "shared": {"messages": 1, "tools": 1}}

A short call works the same way: its request is what is new, and `request_of` is `{"call_id": C, NAME: n, …}`.
`prompt_of`, `{"call_id": C, "tokens": n}`, says that the prompt begins with the first n tokens of call C (prompt and
answer). If `request_of` or `prompt_of` is absent or null, nothing is shared. C is an earlier call in the same list.
`full_calls` restores full requests and prompts.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.http import LARGE
from ..core.json_text import encode, loads, loads_in_turns
from ..core.records import SAMPLING, ModelCall
from .database import Row

LONG_TEXT = 100  # characters from which on a text is shared with the parent's
LARGE_OBJECT = 1_000  # bytes of JSON, likewise
# `request_of` has this name itself, and `sampling` of a call shows these in full.
_NEVER_SHARED = {"call_id", *SAMPLING}
TOKEN_SIZE = 4  # bytes
PARENTS = 16  # calls of a rollout that are kept to read later ones

Json = dict[str, Any]


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # the usual case, at the speed of one comparison
        return length
    return next(i for i in range(length) if a[i] != b[i])


def is_same(a: Any, b: Any) -> bool:
    """Compare values as JSON text: Python treats True, 1 and 1.0 as equal, and ignores the order of names."""
    if a is b or a != b:
        return a is b
    if type(a) is dict and {*map(type, a.values())} == {str}:  # most messages; writing them takes ten times as long
        return [*a] == [*b]
    return isinstance(a, str) or encode(a) == encode(b)


def same_prefix(a: list[Any], b: list[Any]) -> int:
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if one is not other and not is_same(one, other):
            return i
    return min(len(a), len(b))


def shrink_request(request: Json, parent: Json | None) -> Json:
    """Return the stored form of `request`, relative to its parent."""
    if parent is None:
        return {"new": request}
    new, shared = dict(request), dict[str, int]()
    for name, value in request.items():
        if name not in _NEVER_SHARED and (count := _shared(value, parent.get(name))):
            shared[name], new[name] = count, {} if isinstance(value, dict) else value[count:]
    return {"new": new, "shared": shared}


def _shared(value: Any, before: Any) -> int:
    """Return how many leading items or characters a value shares with its parent's. An object shares all or none."""
    if isinstance(value, dict):
        return len(value) if is_same(value, before) and len(encode(value)) >= LARGE_OBJECT else 0
    if type(value) is not type(before) or not isinstance(value, list | str):
        return 0
    if isinstance(value, list):
        return same_prefix(value, before)
    count = len(before)
    if not value.startswith(before):
        count = bisect(range(1, count + 1), False, key=lambda length: not value.startswith(before[:length]))
    return count if count >= LONG_TEXT else 0


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as 32-bit integers, in the machine's byte order."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes | None) -> tuple[int, ...]:
    return tuple(array("i", data or b""))


class Parent(NamedTuple):
    """The parts of an earlier call that its children are restored from. `tokens`: its prompt and answer, packed."""

    request: Json
    tokens: bytes


def newest_parents(known: Mapping[str, Parent], calls: Sequence[ModelCall]) -> dict[str, Parent]:
    """Return the newest of the known parents and these calls, for reading later calls of the rollout."""
    more = {call.call_id: Parent(call.request, pack_ids(call.row_token_ids)) for call in calls[-PARENTS:]}
    return dict([*{**known, **more}.items()][-PARENTS:])


def full_calls(
    calls: Iterable[Json], known: Mapping[str, Parent] = MappingProxyType({}), *, prompts: bool = True
) -> list[Json]:
    """Return a rollout's short calls with full requests, which share their messages in memory.

    `known`: calls that were read before. Without `prompts`, prompts stay short: in full they take much memory.
    """
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
    return dict(islice(before.items(), shared)) | own if isinstance(before, dict) else before[:shared] + own


def short_calls(rows: Iterable[Row], known: Mapping[str, Parent]) -> Iterator[Json]:
    """Yield each stored call's id, its answer's tokens, and the fields that are given relative to its parent.

    `known`: calls that were read before and may be parents of these. Work and memory for all calls are linear in the
    rollout's content.
    """
    sizes = {call_id: len(parent.tokens) // TOKEN_SIZE for call_id, parent in known.items()}
    for row in rows:
        call_id, parent_id, tokens = row["call_id"], row["parent_id"], row["prompt_shared"]
        stored, prompt, answer = _stored_request(row), unpack_ids(row["prompt_ids"]), unpack_ids(row["token_ids"])
        shared = stored.get("shared")
        sizes[call_id] = tokens + len(prompt) + len(answer)
        yield {
            "call_id": call_id,
            "request": stored["new"],
            "request_of": {"call_id": parent_id, **shared} if shared else None,
            "prompt_token_ids": prompt,
            "prompt_of": {"call_id": parent_id, "tokens": tokens} if tokens else None,
            "response_token_ids": answer,
            "extends": parent_id if 0 < tokens == sizes.get(parent_id) else None,
        }


def _stored_request(row: Row) -> Json:
    """Parse a stored request; if it is too deeply nested for the parser, parse it without its wrapper."""
    text = row["request"] or row["large_request"]
    try:
        stored: Json = loads(text) if len(text) < LARGE else loads_in_turns(text)
        return stored
    except ValueError:
        return {"new": loads(text.removeprefix('{"new":')[:-1])}
