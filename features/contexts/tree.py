"""Puts the conversations of a rollout's calls into one tree, in which what several contexts share is one path.

A call's request comes as what it adds to its parent's, so that the tree takes as much work as the rollout has content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unicodedata import normalize

from ...core.records import ModelCall
from ...core.tools import conversation
from ...proxy.dialects.atoms import (
    QUOTING_CHARACTERS,
    TELLING,
    Atom,
    answer_atoms,
    fragments,
    is_unique,
    item_atoms,
    parsed,
    request_atoms,
    same_arguments,
    same_json,
    strings,
    without_thoughts,
)
from ...store.requests import begun

Json = dict[str, Any]
Key = tuple[str, str, str]
KeyedAtom = tuple[Key, Atom]

# Where requests have what stands before their conversation, and what may be all of it.
SYSTEM, WHOLE = ("system", "instructions"), ("prompt", "input")
# What else says which answer is asked for: requests that differ in it are not the same.
FORM = (
    "tools", "functions", "tool_choice", "response_format", "text", "output_config", "output_format",
    "structured_outputs", "guided_json", "previous_response_id",
)  # fmt: skip
BEFORE = (*SYSTEM, *WHOLE, *FORM)


class Node:
    """An atom in a context, after those before it.

    `answered`: the calls whose request and answer end here, by their places in the rollout.
    `tip`: the nearest node from here up to the root that ends in an answer. `texts`: as `telling` finds them.
    """

    __slots__ = ("answered", "atom", "key", "kids", "parent", "texts", "tip")

    def __init__(self, parent: Node | None, key: Key, atom: Atom) -> None:
        self.parent, self.key, self.atom = parent, key, atom
        self.texts = telling(atom)
        self.tip: Node | None = None if parent is None else parent.tip
        self.kids: dict[Key, Node] = {}
        self.answered: list[int] = []

    def then(self, *atoms: KeyedAtom) -> Node:
        """Return the node that these atoms lead to."""
        node = self
        for key, atom in atoms:
            if (kid := node.kids.get(key)) is None:
                kid = node.kids[key] = Node(node, key, atom)
            node = kid
        return node

    def up_to(self, above: Node | None) -> Iterator[Node]:
        """Yield the nodes from here up to the one below `above`, or below the root."""
        node = self
        while node is not above and node.parent is not None:
            yield node
            node = node.parent


def key_of(atom: Atom) -> Key:
    """Return what makes an atom the same however a client writes it. The ids of tool calls do not count."""
    if atom.kind == "call":
        return "call", atom.name, same_arguments(atom.what)
    if atom.kind == "text" and atom.who == "assistant":
        return "text", atom.who, same_json(atom.what) or "".join(normalize("NFC", atom.what).split())
    return atom.kind, atom.who if atom.kind == "text" else "", atom.what


def keyed(atoms: Iterable[Atom]) -> list[KeyedAtom]:
    """Return the atoms with their keys."""
    return [(key_of(atom), atom) for atom in atoms]


def telling(atom: Atom) -> frozenset[str]:
    """Return the texts of an atom by which a quotation of it is known: pieces of it, what a tool call says, its id."""
    said = [*strings(parsed(atom.what))] if atom.kind == "call" else [_ends_of(atom.what)]
    pieces = {piece for text in said for piece in fragments(text) if len(piece.encode(errors="replace")) >= TELLING}
    return frozenset(pieces | {atom.who} if atom.kind == "call" and is_unique(atom.who) else pieces)


def _ends_of(text: str) -> str:
    long = len(text) > 2 * QUOTING_CHARACTERS
    return f"{text[:QUOTING_CHARACTERS]}\n{text[-QUOTING_CHARACTERS:]}" if long else text


class _Placed:
    """A request in the tree: a node for each message that it adds to its parent's, and the texts before these."""

    __slots__ = ("before", "first", "kept", "nodes", "parent")

    def __init__(self, parent: _Placed | None, kept: int, first: Node, before: Json) -> None:
        self.parent, self.kept, self.first, self.before = parent, kept, first, before
        self.nodes: list[Node] = []

    def node_after(self, messages: int) -> Node:
        """Return the node that so many messages lead to."""
        placed = self
        while placed.parent is not None and messages <= placed.kept:
            placed = placed.parent
        return placed.nodes[messages - placed.kept - 1] if messages > placed.kept else placed.first


class Tree:
    """The tree of a rollout's calls. Add them in order, each with its request, then its answer."""

    def __init__(self) -> None:
        self._root = Node(None, ("", "", ""), Atom("", "", ""))
        self._placed: dict[str, _Placed] = {}
        self._responses: dict[str, Node] = {}  # by the ids that requests of Responses continue
        self._read: dict[int, tuple[Any, list[KeyedAtom]]] = {}  # messages that calls share, read once

    def asked(self, call: ModelCall) -> Node:
        """Add a call's request, and return the node that it ends in."""
        of = call.request_of or {}
        parent = self._placed.get(str(of.get("call_id")))
        before = {name: _whole(call.request.get(name), name, of, parent) for name in BEFORE}
        first = self._responses.get(str(call.request.get("previous_response_id")))
        first = first or self._root.then(*keyed(request_atoms({name: before[name] for name in SYSTEM})))
        kept = of.get("messages", 0) if "messages" in call.request else of.get("input", 0)
        kept = 0 if parent is None or isinstance(before["input"], str) else kept
        placed = self._placed[call.call_id] = _Placed(parent, kept, first, before)
        node = first
        if parent is not None and kept:
            node = parent.node_after(kept)
            if parent.first is not first:  # another system prompt: the same messages once more, below it
                node, placed.parent, placed.kept = first, None, 0
                for i in range(kept):
                    between = parent.node_after(i + 1).up_to(parent.node_after(i))
                    node = node.then(*keyed([one.atom for one in between][::-1]))
                    placed.nodes.append(node)
        for message in conversation(call.request):
            node = node.then(*self._atoms_of(message))
            placed.nodes.append(node)
        return node.then(*keyed(Atom("text", "user", text) for name in WHOLE if (text := before[name]) is not None))

    def form(self, call: ModelCall, node: Node) -> list[Any] | None:
        """Return what a call's request has beside its conversation; None if that is not all there or not in words."""
        placed = self._placed[call.call_id]
        is_whole = node is not placed.first and "conversation" not in call.request
        return [placed.before[name] for name in FORM] if is_whole else None

    def _atoms_of(self, message: Any) -> list[KeyedAtom]:
        if (read := self._read.get(id(message))) is None:
            read = self._read[id(message)] = message, keyed(item_atoms(message))
        return read[1]

    def answered(self, call: ModelCall, place: int, node: Node) -> list[Atom]:
        """Add a call's answer, which may come back without its thoughts. Return what its first choice says."""
        response = call.response if call.status == "ok" and isinstance(call.response, dict) else {}
        said = [answer for answer in answer_atoms(response) if answer]
        for answer in said:
            plain = [one._replace(what=without_thoughts(one.what)) if one.kind == "text" else one for one in answer]
            for way in (answer, [one for one in plain if one.what or one.kind == "call"]):
                end = node.then(*keyed(way))
                end.tip = end
                if place not in end.answered:
                    end.answered.append(place)
        if said and isinstance(name := response.get("id"), str):
            self._responses[name] = node.then(*keyed(said[0]))
        return said[0] if said else []


def _whole(value: Any, name: str, of: Json, parent: _Placed | None) -> Any:
    """A part of a request, with what it shares with its parent's; None where it is not said in words."""
    if name in WHOLE and not isinstance(value, str):
        return None
    return value if parent is None or name not in of else begun(parent.before[name], of[name], value)
