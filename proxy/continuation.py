"""Rollouts that nobody names: a request belongs to the rollout whose conversation it goes on with. Contract, section 1.

Conversations are compared as atoms (what was said, by whom; which tool call; which result), so that fields which
clients drop, add or reformat when they send an answer back make no difference. Nothing is shared between API keys.
Pure; what is remembered, and found again, is in `conversations.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from lightning_proxy.proxy.json_text import dumps

Json = dict[str, Any]

# An answer as short as "ok" is given in many rollouts, and says nothing of where a conversation comes from.
TELLING_CHARACTERS = 24


class Atom(NamedTuple):
    """One thing in a conversation. `kind`: text, call or result; `who`: a role, or the id of a tool call."""

    kind: str
    who: str
    what: str


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
