"""Reads requests and prompts that are stored relative to their parents', in full or as additions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...core.http import LARGE
from ...core.json_text import loads, loads_in_turns
from ..database import Row
from .delta import Outline, grow_request, short_request, unpack_ids

TOKEN_SIZE = 4  # bytes


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
