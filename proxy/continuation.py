"""Rollouts that nobody names: a request belongs to the rollout whose conversation it goes on with. Contract, section 1.

Conversations are compared as atoms (what was said, by whom; which tool call; which result), so that fields which
clients drop, add or reformat when they send an answer back make no difference. Nothing is shared between API keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from lightning_proxy.proxy.json_text import dumps

Json = dict[str, Any]

# An answer as short as "ok" is given in many rollouts, and says nothing of where a conversation comes from.
TELLING_CHARACTERS = 24
# Of rollouts that all stand at the same point, as many are remembered.
LEAVES = 64


class Atom(NamedTuple):
    """One thing in a conversation. `kind`: text, call or result; `who`: a role, or the id of a tool call."""

    kind: str
    who: str
    what: str


class Conversations:
    """Which rollout each conversation of the past belongs to; the ones that were quiet the longest are forgotten."""

    def __init__(self, remembered: int = 500_000) -> None:
        self._remembered = remembered
        # By digest: the rollouts that nothing has gone on with from there, newest last; the last rollout that was there
        # at all; the one rollout that a tool-call id, a response id, a telling answer or a sub-agent's order is from.
        self._leaves: OrderedDict[bytes, list[str]] = OrderedDict()
        self._passed: OrderedDict[bytes, str] = OrderedDict()
        self._origins: OrderedDict[bytes, str | None] = OrderedDict()

    def find(self, scope: str, request: Json, *, is_retry: bool = False) -> str | None:
        """The rollout that a request goes on with, or, for a client's retry, that it was sent in before."""
        atoms = request_atoms(request)
        if is_retry and (again := self._passed.get(_digest(scope, b"asked", *_chain(atoms)[-1:]))):
            return again
        previous = request.get("previous_response_id")
        if isinstance(previous, str) and (origin := self._origins.get(_digest(scope, b"response", _bytes(previous)))):
            return origin
        return self._extended(scope, atoms) or self._quoted(scope, atoms)

    def asked(self, scope: str, rollout_id: str, request: Json) -> None:
        """A call of the rollout begins."""
        self._put(self._passed, _digest(scope, b"asked", *_chain(request_atoms(request))[-1:]), rollout_id)

    def answered(self, scope: str, rollout_id: str, request: Json, response: Any) -> None:
        """A call of the rollout was answered."""
        if not isinstance(response, dict):
            return
        atoms = request_atoms(request)
        # A search for the very question does not tell which of those who ask it goes on here.
        asked = {_digest(scope, b"order", _bytes(what)) for kind, _, what in atoms if kind == "text"}
        for answer in answers(response):
            state = _digest(scope, *_chain([*atoms, *answer])[-1:])
            leaves = self._leaves.setdefault(state, [])
            leaves.append(rollout_id)
            del leaves[:-LEAVES]
            self._leaves.move_to_end(state)
            self._put(self._passed, state, rollout_id)
            for origin in set(_origins(scope, answer)) - asked:
                known = self._origins.get(origin, rollout_id)
                self._put(self._origins, origin, rollout_id if known == rollout_id else None)
        if isinstance(name := response.get("id"), str):
            self._put(self._origins, _digest(scope, b"response", _bytes(name)), rollout_id)
        while len(self._leaves) > self._remembered:
            self._leaves.popitem(last=False)

    def _extended(self, scope: str, atoms: list[Atom]) -> str | None:
        """By the longest beginning that was an answered conversation; rather one that nothing has gone on with yet."""
        chain = _chain(atoms)
        for i in range(len(atoms) - 1, 0, -1):
            if atoms[i - 1].who != "assistant" and atoms[i - 1].kind != "call":
                continue
            state = _digest(scope, chain[i - 1])
            if waiting := self._leaves.get(state):
                found = waiting.pop()
                if not waiting:
                    del self._leaves[state]
                return found
            if found_before := self._passed.get(state):
                return found_before
        return None

    def _quoted(self, scope: str, atoms: list[Atom]) -> str | None:
        """By what an edited or summarised history still holds of one rollout only, the newest first."""
        for atom in reversed(atoms):
            for origin in _origins(scope, [atom]):
                if (found := self._origins.get(origin)) is not None:
                    return found
        return None

    def _put(self, table: OrderedDict[bytes, Any], key: bytes, value: Any) -> None:
        table[key] = value
        table.move_to_end(key)
        while len(table) > self._remembered:
            table.popitem(last=False)


def request_atoms(request: Json) -> list[Atom]:
    """The conversation that a request of any recorded API sends."""
    found = []
    for name in ("system", "instructions"):
        found += _content("system", request.get(name))
    items = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(items, str):
        return [*found, *_content("user", items)]
    for item in items if isinstance(items, list) else ():
        found += _item(item) if isinstance(item, dict) else _content("user", item)
    return found


def answers(response: Json) -> Iterator[list[Atom]]:
    """Each choice of an answer, as what the agent may send back of it."""
    if isinstance(output := response.get("output"), list):
        yield [atom for item in output if isinstance(item, dict) for atom in _item(item)]
    elif isinstance(response.get("content"), list):
        yield _item({"role": "assistant", "content": response["content"]})
    else:
        choices = response.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            message = choice.get("message") if isinstance(choice, dict) else None
            if isinstance(message, dict):
                yield _item({"role": "assistant"} | message)


def _item(item: Json) -> list[Atom]:
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        return [Atom("call", str(item.get("call_id")), _arguments(item.get("arguments", item.get("input"))))]
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return [Atom("result", str(item.get("call_id")), "")]
    if kind not in (None, "message"):
        return []  # reasoning, say: some clients send it back, others do not
    role = str(item.get("role"))
    if role == "tool":
        return [Atom("result", str(item.get("tool_call_id")), "")]
    calls = item.get("tool_calls")
    return [
        *_content("system" if role == "developer" else role, item.get("content")),
        *(_tool_call(call) for call in (calls if isinstance(calls, list) else ()) if isinstance(call, dict)),
    ]


def _tool_call(call: Json) -> Atom:
    function = call.get("function")
    return Atom(
        "call", str(call.get("id")), _arguments(function.get("arguments") if isinstance(function, dict) else "")
    )


def _content(role: str, content: Any) -> list[Atom]:
    """Neighbouring texts are one: some clients cut them up, others join them."""
    texts, others = [], []
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else ():
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            match part.get("type"):
                case "tool_use":
                    others.append(Atom("call", str(part.get("id")), _arguments(part.get("input"))))
                case "tool_result":
                    others.append(Atom("result", str(part.get("tool_use_id")), ""))
                case "thinking" | "redacted_thinking":
                    pass
                case _:
                    texts.append(str(part.get("text", part)))
    text = "".join(texts).strip()
    return [*([Atom("text", role, text)] if text else []), *others]


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _chain(atoms: Iterable[Atom]) -> list[bytes]:
    """A digest for every beginning of the conversation. Of a tool call its id counts, not how its arguments look."""
    state, found = b"", []
    for kind, who, what in atoms:
        state = _digest("", state, _bytes(kind), _bytes(who), b"" if kind == "call" else _bytes(what))
        found.append(state)
    return found


def _origins(scope: str, atoms: Iterable[Atom]) -> Iterator[bytes]:
    """What of an answer, or of a later request, tells where it came from."""
    for kind, who, what in atoms:
        if kind in ("call", "result"):
            yield _digest(scope, b"id", _bytes(who))
        if kind == "call":
            for order in _telling_strings(what):
                yield _digest(scope, b"order", _bytes(order))
        elif kind == "text" and who in ("assistant", "user") and len(what) >= TELLING_CHARACTERS:
            # What a user says may be what a tool call told a sub-agent to do.
            yield _digest(scope, b"said" if who == "assistant" else b"order", _bytes(what))


def _telling_strings(arguments: str) -> Iterator[str]:
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return
    for value in found.values() if isinstance(found, dict) else ():
        if isinstance(value, str) and len(value.strip()) >= TELLING_CHARACTERS:
            yield value.strip()


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def _digest(scope: str, *parts: bytes) -> bytes:
    digest = blake2b(_bytes(scope), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def scope_of(headers: Mapping[str, str]) -> str:
    """Who asks: requests with different credentials never share a rollout."""
    return "\n".join(headers.get(name, "") for name in ("authorization", "x-api-key", "api-key"))
