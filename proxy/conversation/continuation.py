"""Rollouts that nobody names: a request belongs to the rollout whose conversation it goes on with. Contract, section 1.

Conversations are compared as atoms (what was said, by whom; which tool call; which result), so that fields which
clients drop, add or reformat when they send an answer back make no difference. Nothing is shared between API keys.
Pure; what is remembered, and found again, is in `conversations.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from ..apis.tools import answered_call, call_arguments, dicts, is_call
from ..json_text import dumps

Json = dict[str, Any]

# A text as short as "ok" is said in many rollouts, and tells nothing of where a conversation comes from. In bytes.
TELLING, TELLING_ORDER, TELLING_ID = 24, 12, 20
# Of a long text that the model says, as many fragments are remembered from either end.
FRAGMENTS = 4
# Where a request goes on with nothing that is known: how many quotations, in how much of a text's ends, are looked for.
QUOTATIONS, QUOTING_CHARACTERS = 500, 20_000
# Where texts are cut into fragments, so that one is found again in whatever it is wrapped in: a transcript, JSON, XML.
_CUTS = re.compile(r'[\n\r\t"<>{}\[\]|:.!?;。！？]+')
_TRIMMED = " ,'*_#()-\\"


class Atom(NamedTuple):
    """One thing in a conversation. `kind`: text, call or result; `who`: a role, or a tool call's id, if it has one.

    `what`: the text, the call's arguments as JSON, or the text of the result.
    """

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
            elif isinstance(choice, dict) and isinstance(text := choice.get("text"), str):
                yield _content("assistant", text)  # of completions: it comes back within the next prompt


def _item(item: Json) -> list[Atom]:
    kind = item.get("type")
    if is_call(item):
        return [Atom("call", str(item.get("call_id")), call_arguments(item))]
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return [Atom("result", str(answered_call(item)), _text(item.get("output")))]
    if kind not in (None, "message"):
        return []  # reasoning, say: some clients send it back, others do not
    role = str(item.get("role"))
    if role == "tool":
        return [Atom("result", str(item.get("tool_call_id")), _text(item.get("content")))]
    if role == "function":
        return [Atom("result", "", _text(item.get("content")))]
    called = item.get("function_call")  # of OpenAI's API before there were tools
    return [
        *_content("system" if role == "developer" else role, item.get("content")),
        *(_tool_call(str(call.get("id")), call.get("function")) for call in dicts(item.get("tool_calls"))),
        *([_tool_call("", called)] if isinstance(called, dict) else []),
    ]


def _tool_call(call_id: str, function: Any) -> Atom:
    return Atom("call", call_id, _arguments(function.get("arguments") if isinstance(function, dict) else ""))


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
                    others.append(Atom("result", str(part.get("tool_use_id")), _text(part.get("content"))))
                case "thinking" | "redacted_thinking":
                    pass
                case _:
                    # Marks for the provider's cache move on from turn to turn.
                    what = {name: value for name, value in part.items() if name != "cache_control"}
                    texts.append(str(what.get("text", what)))
    text = "".join(texts).strip()
    return [*([Atom("text", role, text)] if text else []), *others]


def _text(content: Any) -> str:
    return "".join(what for _, _, what in _content("", content))


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _chain(atoms: Iterable[Atom]) -> list[bytes]:
    """A digest for every beginning of the conversation. Of calls and results the id counts, if it is one of a kind."""
    state, found = b"", []
    for kind, who, what in atoms:
        is_one_of_a_kind = len(who) >= TELLING_ID
        shown = what if kind == "text" else dumps(_parsed(what)) if kind == "call" and not is_one_of_a_kind else ""
        state = _digest("", state, _bytes(kind), _bytes(who), _bytes(shown))
        found.append(state)
    return found


def _new_origins(scope: str, asked: Iterable[Atom], answer: Iterable[Atom]) -> set[bytes]:
    """What tells that something came from this answer: ids, and what the model said that nobody had told it."""
    told, found = [what for _, _, what in asked], set()

    def add(name: bytes, text: str, telling: int) -> None:
        """Not what is short, nor what is repeated: the question, say, or a page that others may read too."""
        if len(raw := _bytes(text)) >= telling and not any(text in what for what in told):
            found.add(_digest(scope, name, raw))

    for kind, who, what in answer:
        if kind == "call" and who:
            found.add(_digest(scope, b"id", _bytes(who)))
        orders = list(_strings(_parsed(what))) if kind == "call" else []
        for order in orders:
            add(b"order", order, TELLING_ORDER)
        for text in [who, *orders] if kind == "call" else [what]:
            for fragment in _ends(list(_fragments(text))):
                add(b"said", fragment, TELLING)
    return found


def _ends(fragments: list[str]) -> list[str]:
    return fragments if len(fragments) <= 2 * FRAGMENTS else [*fragments[:FRAGMENTS], *fragments[-FRAGMENTS:]]


def _quotes(scope: str, atoms: Iterable[Atom]) -> Iterator[bytes]:
    """What may tell where something in a request came from. What came first is its own rollout's.

    A prompt tells nothing: what one rollout found may be in the prompt of all that follow.
    """
    for kind, who, what in atoms:
        if who == "system":
            continue
        if kind != "text":
            if who:
                yield _digest(scope, b"id", _bytes(who))
            continue
        if who == "user":  # it may be what a tool call told a sub-agent to do
            yield _digest(scope, b"order", _bytes(what))
        whole = len(what) <= 2 * QUOTING_CHARACTERS
        for fragment in _fragments(what if whole else f"{what[:QUOTING_CHARACTERS]}\n{what[-QUOTING_CHARACTERS:]}"):
            if len(raw := _bytes(fragment)) >= TELLING:
                yield _digest(scope, b"said", raw)


def _fragments(text: str) -> Iterator[str]:
    """Also of texts within JSON (an escaped line break) and within Python's lists (`', '`)."""
    lines = text.replace("\\n", "\n").replace("', '", "\n")
    return (piece.strip(_TRIMMED) for piece in _CUTS.split(lines) if len(piece) >= TELLING // 4)


def _strings(value: Any) -> Iterator[str]:
    """All texts in the arguments of a tool call."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


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
