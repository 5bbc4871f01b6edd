"""Recognises a conversation, however a client writes it, by its atoms, by ids in its answers, and by digests. Pure.

Atoms are texts, calls and results: they ignore fields that clients drop, add or reformat when they send an answer back.
Marks occur in one answer only: ids of items and tool calls, signatures, thoughts. Clients send them back unchanged,
even if they edit, shorten or omit the answer itself. Stored digests depend on the caller, so API keys share none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple
from unicodedata import normalize

import orjson

from ...core.tools import answers, calls_in, conversation, dicts, results_in

Json = dict[str, Any]
Key = tuple[str, str, str]

UNIQUE, LONG = 9, 24  # from this many characters on, an id or a thought occurs in no other answer
# Ids that may be counted from 0 in every answer, or come from an example: `functions.search:0`, `call_1`.
_COUNTED = re.compile(r".*:\d{1,5}|\D*\d{1,5}", re.DOTALL)
_NO_TEXTS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
# From how many characters on a value of these fields occurs in no other answer: ids, signatures, thoughts.
_MARKS = dict.fromkeys(
    ("id", "call_id", "tool_call_id", "tool_use_id", "encrypted_content", "signature", "data"), UNIQUE
) | dict.fromkeys(("reasoning", "reasoning_content"), LONG)

# Fewer bytes do not show which rollout a text comes from: "ok" is in many.
TELLING, TELLING_ORDER = 24, 12
# How many fragments of a long text are remembered from either end.
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
_FENCED = re.compile(r"```(?:json)?(.*)```", re.DOTALL | re.IGNORECASE)


class Atom(NamedTuple):
    """One text, call or result in a conversation, as `kind` says. `who` is a role or a tool call's id.

    `what`: the text, the call's arguments as JSON, or the result's text. `name`: the called function's name.
    """

    kind: str
    who: str
    what: str
    name: str = ""

    @property
    def key(self) -> Key:
        """Return a key that is the same however a client writes the atom. Ids of tool calls do not count."""
        if self.kind == "call":
            return "call", self.name, same_arguments(self.what)
        if self.kind == "text":
            return "text", self.who, same_text(self.what) if self.who == "assistant" else self.what
        return self.kind, "", self.what


def request_atoms(request: Json) -> list[Atom]:
    """Return the atoms of the conversation in a request of any recorded API."""
    atoms = [atom for name in ("system", "instructions") for atom in _said("system", request.get(name))]
    text = request.get("input", request.get("prompt"))
    items = [text] if isinstance(text, str) and "messages" not in request else conversation(request)
    return [*atoms, *(atom for item in items for atom in item_atoms(item))]


def answer_atoms(response: Json) -> Iterator[list[Atom]]:
    """Return, for each choice of an answer, the atoms that the agent may send back."""
    return ([atom for item in answer for atom in item_atoms(item)] for answer in answers(response))


def item_atoms(item: Any) -> list[Atom]:
    """Return the atoms of a message or of a Responses item. A bare string counts as a user's message."""
    if not isinstance(item, dict):
        return _said("user", item)
    role = str(item.get("role"))
    # Reasoning, say, has no text here: some clients send it back, others do not.
    has_text = item.get("type") in (None, "message") and role not in ("tool", "function")
    atoms = _said("system" if role == "developer" else role, item.get("content")) if has_text else []
    if role != "assistant":
        atoms += (Atom("result", one.tool_call_id or "", text_of(one.content)) for one in results_in(item))
    if role != "user":
        atoms += (Atom("call", call.id or "", call.arguments, call.name) for call in calls_in(item))
    return atoms


def _said(role: str, content: Any) -> list[Atom]:
    return [Atom("text", role, text)] if (text := text_of(content)) else []


def text_of(content: Any) -> str:
    """Return a message's content as one text, since clients split and join texts. Omits calls, results and thoughts."""
    if not isinstance(content, list):
        return content.strip() if isinstance(content, str) else ""
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") not in _NO_TEXTS:
            # Marks for the provider's cache move on from turn to turn.
            what = {name: value for name, value in part.items() if name != "cache_control"}
            texts.append(str(what.get("text", what)))
    return "".join(texts).strip()


def same_arguments(text: str) -> str:
    """Return a call's arguments in canonical form, however a client writes them. An empty string becomes {}."""
    text = text.strip()
    return same_json(text or "{}") or text


def same_text(text: str) -> str:
    """Return a text of the model in canonical form, however a client writes it."""
    return same_json(text) or "".join(normalize("NFC", text).split())


def same_json(text: str) -> str | None:
    """Return the canonical form of a text that is JSON; None if it is not a JSON object or list."""
    text = text.strip()
    if fenced := _FENCED.fullmatch(text):
        text = fenced[1].strip()
    if text[:1] not in ("{", "["):
        return None
    try:
        return orjson.dumps(json.loads(text, parse_float=_even), option=orjson.OPT_SORT_KEYS).decode()
    except (ValueError, TypeError, RecursionError):
        return None


def _even(number: str) -> float:
    """The number, as an integer if it is whole and below 2**53, because some clients write 3 as 3.0."""
    value = float(number)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def parsed(text: str) -> Any:
    """Return the value of a JSON text, or else the text itself."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def is_unique(mark: str) -> bool:
    """Return whether an id looks unique to one answer."""
    return len(mark) >= UNIQUE and _COUNTED.fullmatch(mark) is None


def answer_marks(response: Json) -> Iterator[str]:
    """Yield the marks of an answer of any recorded API."""
    return chain.from_iterable(_marks(item) for answer in answers(response) for item in answer)


def request_marks(request: Json) -> Iterator[str]:
    """Yield the marks of answers that a request sends back or refers to, the newest first."""
    return chain.from_iterable(map(_marks, reversed(dicts(conversation(request)))))


def _marks(item: Json) -> Iterator[str]:
    for part in (
        item,
        *(part for name in ("tool_calls", "content", "reasoning_details") for part in dicts(item.get(name))),
    ):
        for name, least in _MARKS.items():
            if isinstance(text := part.get(name), str) and len(text) >= least and is_unique(text):
                yield text


def digest(caller: str, *parts: bytes | str) -> bytes:
    """Return a digest of the parts, different for each caller."""
    hashed = blake2b(_bytes(caller), digest_size=16)
    for part in parts:
        raw = _bytes(part) if isinstance(part, str) else part
        hashed.update(len(raw).to_bytes(8, "little"))
        hashed.update(raw)
    return hashed.digest()


class State(NamedTuple):
    """Digests of a conversation up to a point: with the content of tool results (`exact`) and without it (`loose`)."""

    exact: bytes = b""
    loose: bytes = b""

    def then(self, kind: str, who: str, what: str) -> State:
        """Return the state after one more atom with this key."""
        exact = digest("", self.exact, kind, who, what)
        if self.exact == self.loose and kind != "result":
            return State(exact, exact)
        return State(exact, digest("", self.loose, kind, who, "" if kind == "result" else what))


def beginnings(atoms: Iterable[Atom], state: State = State()) -> list[State]:
    """Return the state of the conversation after each of these atoms. `state`: its state before the first one.

    Ids of calls do not count, because clients write new ones, nor do system prompts, because some change every turn.
    Up to `IN_A_ROW` adjacent assistant texts count as one: a client may have the model continue an answer.
    """
    states, before, text, in_a_row = [], state, "", 0
    for atom in atoms:
        if atom.kind == "text" and atom.who == "assistant":
            if in_a_row == IN_A_ROW:
                before, text, in_a_row = state, "", 0
            text, in_a_row = text + atom.what, in_a_row + 1
            state = before.then("text", "assistant", same_text(text))
        elif atom.who != "system":
            state = state.then(*atom.key)
            before, text, in_a_row = state, "", 0
        states.append(state)
    return states


def origins(caller: str, request_text: str, answer: Iterable[Atom], marks: Iterable[str] = ()) -> set[bytes]:
    """Return digests that identify this answer: of its marks, and of texts that are not in the request.

    `request_text`: all texts of the request, joined. An answer may repeat some, such as the question or a shared page.
    If the answer has very many texts, or the request is very long, only the answer's first texts are used.
    """
    limit = max(2 * FRAGMENTS, min(LOOKED_FOR, LOOKED_THROUGH // (len(request_text) + 1)))
    said = islice((text for atom in answer for text in _told(atom)), limit)
    new = {digest(caller, "said", text) for text in said if text not in request_text}
    return new | {digest(caller, "id", mark) for mark in marks}


def _told(atom: Atom) -> Iterator[str]:
    """The texts of an atom that distinguish its answer from others: strings in a call's arguments, and fragments."""
    orders = [*strings(parsed(atom.what))] if atom.kind == "call" else []
    yield from (order for order in orders if len(_bytes(order)) >= TELLING_ORDER)
    for text in [atom.who, *orders] if atom.kind == "call" else [atom.what]:
        found = [*fragments(text)]
        yield from found if len(found) <= 2 * FRAGMENTS else [*found[:FRAGMENTS], *found[-FRAGMENTS:]]


def quotations(caller: str, atoms: Iterable[Atom]) -> Iterator[tuple[bool, bytes]]:
    """Yield digests that may show which rollout a request quotes: first from answers (True), then from users (False).

    System prompts do not count: the findings of one rollout may be in the prompts of all later ones.
    """
    texts = [atom for atom in atoms if atom.kind == "text" and atom.who != "system"]
    for _, who, what, _ in sorted(texts, key=lambda atom: atom.who == "user"):
        order = [what] if who == "user" else []  # it may be the order that a tool call gave to a sub-agent
        yield from ((who != "user", digest(caller, "said", text)) for text in chain(order, fragments(ends_of(what))))


def ends_of(text: str) -> str:
    """Return what is searched for fragments: the beginning and end of a text, or all of it if it is short."""
    is_short = len(text) <= 2 * QUOTING_CHARACTERS
    return text if is_short else f"{text[:QUOTING_CHARACTERS]}\n{text[-QUOTING_CHARACTERS:]}"


def fragments(text: str) -> Iterator[str]:
    """Yield the characteristic pieces of a text, which can be found again in whatever wraps it.

    The text is also split at escaped line breaks, as in JSON, and at `', '`, as in Python lists."""
    lines = text.replace("\\n", "\n").replace("', '", "\n")
    pieces = (piece.strip(_TRIMMED) for piece in _CUTS.split(lines) if len(piece) >= TELLING // 4)
    return (piece for piece in pieces if len(_bytes(piece)) >= TELLING)


def without_thoughts(text: str) -> str:
    """Return the text after the last `</think>`, or all of it if there is none. The prompt may have the `<think>`."""
    return text.rpartition("</think>")[2].strip()


def strings(value: Any) -> Iterator[str]:
    """Yield all string values in the arguments of a tool call."""
    left = [value]
    while left:  # an agent may nest them as deeply as JSON allows
        value = left.pop()
        if isinstance(value, str):
            yield value.strip()
        elif isinstance(value, dict | list):
            left += reversed([*value.values()] if isinstance(value, dict) else value)


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")
