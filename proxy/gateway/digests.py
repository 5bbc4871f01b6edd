"""Computes digests that find a conversation again, from its beginnings and from the content of its answers.

Each is of one caller: nothing is shared between API keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple
from unicodedata import normalize

from ..dialects.atoms import Atom, parsed, same_arguments, same_json
from ..dialects.marks import is_counted

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
