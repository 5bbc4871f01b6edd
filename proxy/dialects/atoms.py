"""Recognises a conversation, however a client writes it: by its atoms, by ids of its answers, and by digests. Pure.

Atoms are texts, calls and results: fields that clients drop, add or reformat when they send an answer back make no
difference. Marks are what only one answer has: ids of items and tool calls, signatures, thoughts. Clients send these
back as they are, also where they edit, shorten or leave out the answer itself. Digests are of one caller: nothing is
shared between API keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple
from unicodedata import normalize

import orjson

from ...core.tools import answered_call, call_arguments, call_name, called_tool, dicts, is_call

Json = dict[str, Any]

FENCE = "```"

UNIQUE, LONG = 9, 24  # characters from which on an id, or a thought, is no other answer's
# May be counted anew in every answer, or stand in an example: `functions.search:0`, `call_1`.
_COUNTED = re.compile(r".*:\d{1,5}|\D*\d{1,5}", re.DOTALL)

# Fewer bytes do not show which rollout a text comes from: "ok" is in many.
TELLING, TELLING_ORDER = 24, 12
# As many fragments of a long answer are remembered from either end.
FRAGMENTS = 4
# How many texts in a row are read as one: each is read again for every one after it.
IN_A_ROW = 8
# How many texts of an answer are looked for in its request, and in how many characters in all.
LOOKED_FOR, LOOKED_THROUGH = 512, 2**25
# How much of a long text's ends is searched for fragments.
QUOTING_CHARACTERS = 20_000
# Where texts are cut into fragments, so that one is found again in whatever it is wrapped in: a transcript, JSON, XML.
_CUTS = re.compile(r'[\n\r\t"<>{}\[\]|:.!?;。！？]+')
_TRIMMED = " ,'*_#()-\\"


class Atom(NamedTuple):
    """One text, call or result in a conversation. `kind` says which; `who` is a role or a tool call's id.

    `what`: the text, the call's arguments as JSON, or the text of the result. `name`: of the function that is called.
    """

    kind: str
    who: str
    what: str
    name: str = ""


def request_atoms(request: Json) -> list[Atom]:
    """Return the atoms of the conversation in a request of any recorded API."""
    atoms = []
    for name in ("system", "instructions"):
        atoms += _content("system", request.get(name))
    items = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(items, str):
        return [*atoms, *_content("user", items)]
    for item in items if isinstance(items, list) else ():
        atoms += item_atoms(item)
    return atoms


def answer_atoms(response: Json) -> Iterator[list[Atom]]:
    """Return, for each choice of an answer, the atoms that the agent may send back."""
    if isinstance(output := response.get("output"), list):
        yield [atom for item in output if isinstance(item, dict) for atom in item_atoms(item)]
    elif isinstance(response.get("content"), list):
        yield item_atoms({"role": "assistant", "content": response["content"]})
    else:
        choices = response.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            message = choice.get("message") if isinstance(choice, dict) else None
            if isinstance(message, dict):
                yield item_atoms({"role": "assistant"} | message)
            elif isinstance(choice, dict) and isinstance(text := choice.get("text"), str):
                yield _content("assistant", text)  # of completions: it comes back within the next prompt


def item_atoms(item: Any) -> list[Atom]:
    """Return the atoms of one message, or of one item of Responses."""
    if not isinstance(item, dict):
        return _content("user", item)
    kind = item.get("type")
    if is_call(item):
        return [Atom("call", _id(item.get("call_id")), call_arguments(item), call_name(item))]
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return [Atom("result", _id(answered_call(item)), _text(item.get("output")))]
    if kind not in (None, "message"):
        return []  # reasoning, say: some clients send it back, others do not
    role = str(item.get("role"))
    if role == "tool":
        return [Atom("result", _id(item.get("tool_call_id")), _text(item.get("content")))]
    if role == "function":
        return [Atom("result", "", _text(item.get("content")))]
    called = item.get("function_call")  # of OpenAI's API before there were tools
    return [
        *_content("system" if role == "developer" else role, item.get("content")),
        *(_tool_call(_id(call.get("id")), called_tool(call)) for call in dicts(item.get("tool_calls"))),
        *([_tool_call("", called)] if isinstance(called, dict) else []),
    ]


def _tool_call(call_id: str, function: Any) -> Atom:
    function = function if isinstance(function, dict) else {}
    return Atom("call", call_id, call_arguments(function), _id(function.get("name")))


def _id(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _content(role: str, content: Any) -> list[Atom]:
    """The atoms of a message's content. Neighbouring texts are one: some clients cut them up, others join them."""
    texts, others = [], []
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else ():
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            match part.get("type"):
                case "tool_use":
                    name = _id(part.get("name"))
                    others.append(Atom("call", _id(part.get("id")), call_arguments(part), name))
                case "tool_result":
                    others.append(Atom("result", _id(part.get("tool_use_id")), _text(part.get("content"))))
                case "thinking" | "redacted_thinking":
                    pass
                case _:
                    # Marks for the provider's cache move on from turn to turn.
                    what = {name: value for name, value in part.items() if name != "cache_control"}
                    texts.append(str(what.get("text", what)))
    text = "".join(texts).strip()
    return [*([Atom("text", role, text)] if text else []), *others]


def _text(content: Any) -> str:
    return "".join(atom.what for atom in _content("", content))


def same_arguments(text: str) -> str:
    """Return a call's arguments in a canonical form, however a client writes them; none are an empty object."""
    text = text.strip()
    return "{}" if not text or parsed(text) == {} else same_json(text) or text


def same_json(text: str) -> str | None:
    """Return the JSON of a text in a canonical form; None if it is no object and no list."""
    text = text.strip()
    if text.startswith(FENCE) and text.endswith(FENCE) and len(text) >= 2 * len(FENCE):
        text = text[len(FENCE) : -len(FENCE)]
        text = text[4 * (text[:4].lower() == "json") :].strip()
    value = parsed(text) if text[:1] in ("{", "[") else None
    if not isinstance(value, dict | list) or not value:
        return None
    try:
        return orjson.dumps(_even(value), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONEncodeError, RecursionError):
        return None


def parsed(text: str) -> Any:
    """Return the value of a text that is JSON, or else the text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _even(value: Any) -> Any:
    """The value with 3.0 as 3: a client that knows a field to be a float writes it so."""
    if isinstance(value, dict):
        return {name: _even(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_even(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def is_counted(tool_call_id: str) -> bool:
    """Return whether an id looks as if other answers had it, too."""
    return _COUNTED.fullmatch(tool_call_id) is not None


def is_unique(mark: str) -> bool:
    """Return whether a mark looks as if no other answer had it."""
    return len(mark) >= UNIQUE and not is_counted(mark)


def answer_marks(response: Json) -> Iterator[str]:
    """Yield the marks of an answer of any recorded API."""
    for item in dicts(response.get("output")):
        yield from _of_item(item)
    yield from _of_item({"content": response.get("content")})
    for choice in dicts(response.get("choices")):
        if isinstance(message := choice.get("message"), dict):
            yield from _of_item(message)


def request_marks(request: Json) -> Iterator[str]:
    """Yield the marks of answers that a request sends back or refers to, the newest first."""
    for item in reversed(dicts(request.get("messages", request.get("input")))):
        yield from _of_item(item)


def _of_item(item: Json) -> Iterator[str]:
    """The marks of a message, or of an item of Responses."""
    if isinstance(item.get("type"), str):
        yield from _texts(item, "id", "encrypted_content")
    calls = [item, *dicts(item.get("tool_calls")), *(parts := dicts(item.get("content")))]
    names = ("call_id", "tool_call_id", "tool_use_id", "id")
    yield from (text for call in calls for text in _texts(call, *names) if not is_counted(text))
    for part in [*parts, *dicts(item.get("reasoning_details"))]:
        yield from _texts(part, "signature", "data")
    for name in ("reasoning", "reasoning_content"):
        yield from (text for text in _texts(item, name) if len(text) >= LONG)


def _texts(part: Json, *names: str) -> Iterator[str]:
    return (text for name in names if isinstance(text := part.get(name), str) and text)


def digest(caller: str, *parts: bytes | str) -> bytes:
    """Return a digest of the parts, which differs from one caller to another."""
    hashed = blake2b(_bytes(caller), digest_size=16)
    for part in parts:
        raw = _bytes(part) if isinstance(part, str) else part
        hashed.update(len(raw).to_bytes(8, "little"))
        hashed.update(raw)
    return hashed.digest()


class State(NamedTuple):
    """Digests of a conversation up to a point: with the results of tools (`exact`), and without (`loose`)."""

    exact: bytes = b""
    loose: bytes = b""

    def then(self, atom: Atom, shown: str) -> State:
        """Return the state with another atom."""
        who = atom.who if atom.kind == "text" else atom.name
        exact = digest("", self.exact, atom.kind, who, shown)
        if self.exact == self.loose and atom.kind != "result":
            return State(exact, exact)
        return State(exact, digest("", self.loose, atom.kind, who, "" if atom.kind == "result" else shown))


def beginnings(atoms: Iterable[Atom], state: State = State()) -> list[State]:
    """Return a state for every beginning of the conversation. `state`: of the conversation before these atoms.

    The ids of calls do not count: clients write them anew. Adjacent texts of the assistant are one: a client may have
    the model continue where an answer ended.
    """
    states, before, text, in_a_row = [], state, "", 0
    for atom in atoms:
        if atom.kind == "text" and atom.who == "assistant":
            if in_a_row == IN_A_ROW:
                before, text, in_a_row = state, "", 0
            text, in_a_row = text + atom.what, in_a_row + 1
            state = before.then(atom, same_json(text) or "".join(normalize("NFC", text).split()))
        else:
            state = state.then(atom, same_arguments(atom.what) if atom.kind == "call" else atom.what)
            before, text, in_a_row = state, "", 0
        states.append(state)
    return states


def origins(
    caller: str, request_text: str, answer: Iterable[Atom], question: str = "", marks: Iterable[str] = ()
) -> set[bytes]:
    """Return digests that identify this answer: of its ids, and of text that is not in the request.

    `request_text`: all texts of the request, joined. `question`: the last of them that is not an answer. `marks`: ids
    that only this answer has. Of an answer of very many texts, or to a very long request, the first ones count.
    """
    digests = {identified(caller, mark) for mark in marks}
    left = max(2 * FRAGMENTS, min(LOOKED_FOR, LOOKED_THROUGH // (len(request_text) + 1)))

    def add(name: str, text: str, telling: int) -> None:
        """Add a text, unless it is short or repeated. The question and a shared page are repeated, for example."""
        nonlocal left
        if left and len(raw := _bytes(text)) >= telling:
            left -= 1
            if text not in request_text:
                digests.add(digest(caller, name, raw))

    for kind, who, what, _ in answer:
        if kind == "call" and who and not is_counted(who):
            digests.add(identified(caller, who))
        orders = list(strings(parsed(what))) if kind == "call" else []
        for order in orders:
            add("order", order, TELLING_ORDER)
        if as_json := same_json(what):
            digests.add(digest(caller, "json", question, as_json))
            add("json", as_json, TELLING)
        for text in [who, *orders] if kind == "call" else [what]:
            for fragment in _ends(list(fragments(text))):
                add("said", fragment, TELLING)
    return digests


def identified(caller: str, mark: str) -> bytes:
    """Return the digest under which a mark of an answer is remembered."""
    return digest(caller, "id", mark)


def quotations(caller: str, atoms: Iterable[Atom], *, by_users: bool) -> Iterator[bytes]:
    """Yield digests that may show which rollout a request quotes. Those of the request's own rollout come first.

    `by_users`: those in texts of users, else all others. System prompts do not count: findings of one rollout may be in
    the prompt of all later ones.
    """
    question = ""
    for kind, who, what, _ in atoms:
        if who == "system":
            continue
        if kind == "call" or who == "assistant":
            # A short one identifies nothing without its question: "ok": true is the answer to many.
            if not by_users and (as_json := same_json(what)):
                yield digest(caller, "json", question, as_json)
                yield digest(caller, "json", as_json)
        else:
            question = what
        if (who == "user") != by_users:
            continue
        if kind != "text":
            if who and not is_counted(who):
                yield identified(caller, who)
            continue
        if who == "user":  # it may be the order that a tool call gave to a sub-agent
            yield digest(caller, "order", what)
        is_short = len(what) <= 2 * QUOTING_CHARACTERS
        for fragment in fragments(what if is_short else f"{what[:QUOTING_CHARACTERS]}\n{what[-QUOTING_CHARACTERS:]}"):
            if len(raw := _bytes(fragment)) >= TELLING:
                yield digest(caller, "said", raw)


def _ends(fragments: list[str]) -> list[str]:
    return fragments if len(fragments) <= 2 * FRAGMENTS else [*fragments[:FRAGMENTS], *fragments[-FRAGMENTS:]]


def fragments(text: str) -> Iterator[str]:
    """Yield the pieces of a text that are found again in whatever wraps it.

    Also those of texts within JSON (an escaped line break) and within Python's lists (`', '`)."""
    lines = text.replace("\\n", "\n").replace("', '", "\n")
    return (piece.strip(_TRIMMED) for piece in _CUTS.split(lines) if len(piece) >= TELLING // 4)


def without_thoughts(text: str) -> str:
    """Return the text after `</think>`; models whose prompt opens the thoughts write that tag alone."""
    return text.rpartition("</think>")[2].strip()


def last_question(atoms: Iterable[Atom]) -> str:
    """Return the last text that is neither an answer nor a system prompt."""
    questions = [what for kind, who, what, _ in atoms if kind != "call" and who not in ("assistant", "system")]
    return questions[-1] if questions else ""


def strings(value: Any) -> Iterator[str]:
    """Yield all texts in the arguments of a tool call."""
    left = [value]
    while left:  # an agent may nest them as deeply as JSON allows
        value = left.pop()
        if isinstance(value, str):
            yield value.strip()
        elif isinstance(value, dict | list):
            left += reversed([*value.values()] if isinstance(value, dict) else value)


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")
