"""Finds where the context of each call of a rollout comes from: the edges between calls. Pure.

`continues`   its request begins with that call's request and answer
`edits`       its history has that call's answer, but was changed
`compacts`    that call's answer stands in its prompt in place of history that it no longer has
`delegates`   a tool call of that call gave it its order; its context is a new one
`returns`     a result in it is that call's answer, which another context ended in
`retries`     that call had the same request, and its answer was not used

A call without edges begins a new context, or it is not sure where that comes from.

The conversations of all calls are one tree, in which what several contexts share is one path. A request comes as what
it adds to its parent's, so that the tree takes as much work as the rollout has content.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

from ...core.records import ModelCall
from ...core.tools import conversation
from ...proxy.dialects.atoms import (
    TELLING_ORDER,
    Atom,
    Key,
    answer_atoms,
    ends_of,
    fragments,
    is_unique,
    item_atoms,
    parsed,
    request_atoms,
    strings,
    without_thoughts,
)
from ...store.requests import begun

log = logging.getLogger(__name__)

Kind = Literal["continues", "edits", "compacts", "delegates", "returns", "retries"]
SAME: tuple[Kind, ...] = ("continues", "edits", "compacts")  # edges within one context
QUOTED, ENOUGH = 0.5, 4  # the share, or else the number, of an answer's own texts that a quotation has
BY_NAME = 4  # characters of an order, or of a result, that tell where something else does, too
NEWEST = 20  # contexts, or calls, that are asked whether a prompt is their history, written anew, or has their order
CLOCK_S = 0.05  # by which a call may begin before the answer that it has, as two clocks tell it
Json = dict[str, Any]
KeyedAtom = tuple[Key, Atom]
# Where requests have what stands before their conversation, and what may be all of it.
SYSTEM, WHOLE = ("system", "instructions"), ("prompt", "input")
# What else says which answer is asked for: requests that differ in it are not the same.
FORM = (
    "tools", "functions", "tool_choice", "response_format", "text", "output_config", "output_format",
    "structured_outputs", "guided_json", "previous_response_id",
)  # fmt: skip
BEFORE = (*SYSTEM, *WHOLE, *FORM)


class Edge(NamedTuple):
    """An edge to another call, by its place in the rollout."""

    kind: Kind
    place: int


class _Order(NamedTuple):
    """A tool call of the call at `place`, with the texts in its arguments. `name`: its id, if no other has that."""

    place: int
    name: str
    texts: tuple[str, ...]


@dataclass(slots=True)
class _Call:
    """A call as later ones are compared with it. Its request ends at `node`.

    `attempts`: the calls with the same request. `order`: the tool call that began it.
    `root`: the call that began its context. `told`: texts that its answer alone has. `used`: its answer stands in a
    later context; `kept`: as an answer. `has`: the calls whose answers its request has, once that was asked.
    """

    call: ModelCall
    node: Node
    root: int
    attempts: list[int]
    order: str | None = None
    edges: list[Edge] = field(default_factory=list)
    said: list[Atom] = field(default_factory=list)
    told: frozenset[str] = frozenset()
    used: bool = False
    kept: bool = False
    has: set[int] | None = None

    @property
    def ended(self) -> float:
        return self.call.started_at + (self.call.latency_ms or 0.0) / 1000

    @property
    def text(self) -> str:
        return "".join(atom.what for atom in self.said if atom.kind == "text")

    @property
    def is_final(self) -> bool:
        return bool(self.said) and all(atom.kind == "text" for atom in self.said)


class Graph:
    """The calls of a rollout and their edges. Add calls in order."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._tree = Tree()
        self._places: dict[str, int] = {}  # by call id
        self._again: dict[str, int] = {}  # the call that a client sent again, by the call that it sent
        self._forms: defaultdict[tuple[Node, str | None], list[tuple[object, list[int]]]] = defaultdict(list)
        self._ids: dict[str, int] = {}  # the call that made each tool call
        self._answers: defaultdict[Key, list[int]] = defaultdict(list)
        self._told: defaultdict[str, list[int]] = defaultdict(list)
        self._known: dict[str, int] = {}  # texts of requests, and the first call that had them
        self._orders: defaultdict[str, list[_Order]] = defaultdict(list)  # by their texts
        self._open: defaultdict[int, list[_Order]] = defaultdict(list)  # of calls whose tools have no results yet
        self._begun: dict[str, int] = {}  # the call that each of these tool calls began
        self._unsure: set[int] = set()  # of these, those who are asked more than the order
        self._last: dict[int, int] = {}  # the last call of each context, by its root

    def add(self, call: ModelCall) -> None:
        """Add a call, with its request and its answer."""
        place = len(self.calls)
        node = self._tree.asked(call)
        mine = _Call(call, node, place, self._attempts(call, node))
        mine.attempts.append(place)
        self.calls.append(mine)
        self._places[call.call_id] = place
        if call.superseded_by is not None:
            self._again[call.superseded_by] = place
        mine.edges = self._edges(mine, place)
        for kind, there in mine.edges:
            self.calls[there].used |= kind not in ("delegates", "retries")
            self.calls[there].kept |= kind in ("continues", "edits")
        mine.root = next((self.calls[there].root for kind, there in mine.edges if kind in SAME), place)
        self._last[mine.root] = place
        mine.said = self._tree.answered(call, place, node)
        self._remember(mine, place)

    def rejected(self) -> dict[int, int]:
        """Return the calls whose answer stands in no later context, each with another attempt whose answer does.

        That is one at the same request, which began later or was not over. Of an earlier one this is a fresh start.
        Calls that tool calls of their own began are no attempts at the same.
        """
        found, alike = dict[int, int](), defaultdict[tuple[int, str | None], list[int]](list)
        for i, one in enumerate(self.calls):
            if one.said and len(one.attempts) > 1:
                alike[one.attempts[0], one.order].append(i)
        for answered in alike.values():
            said = {i: [atom.key for atom in self.calls[i].said] for i in answered}
            if used := [i for i in answered if self.calls[i].used]:
                stands, last, until = [said[i] for i in used], max(used), max(self.calls[i].ended for i in used)
                tried = [i for i in answered if i < last or self.calls[i].call.started_at < until]
                found |= {i: last for i in tried if said[i] not in stands}
        return found

    def summaries(self) -> set[int]:
        """Return the calls whose answer stands in a later prompt in place of history."""
        return {there for one in self.calls for kind, there in one.edges if kind == "compacts"}

    def counts(self) -> Counter[str]:
        """Count the edges by kind, the calls without one (`new`), and the rejected ones."""
        kinds = Counter[str](edge.kind for one in self.calls for edge in one.edges)
        return kinds + Counter(new=sum(not one.edges for one in self.calls), rejected=len(self.rejected()))

    def _attempts(self, call: ModelCall, node: Node) -> list[int]:
        """The calls so far with the same request: of the same agent, and for an answer of the same form."""
        if (earlier := self._again.get(call.call_id)) is not None:
            return self.calls[earlier].attempts
        if (form := self._tree.form(call, node)) is None:
            return []
        known = self._forms[node, call.agent]
        if all(form != other for other, _ in known):
            known.append((form, []))
        return next(places for other, places in known if form == other)

    def _edges(self, mine: _Call, place: int) -> list[Edge]:
        """The edges of a call: to its own history, to answers that it was given, and else to who ordered it."""
        came = self._came(mine)
        is_more = came is not None and came.kind == "continues"
        new = [*mine.node.up_to(mine.node.tip if is_more else None)][::-1]
        order, is_sure = (None, True) if came is not None else self._order_of(mine, new)
        ordered = "\n".join(order.texts) if order is not None else ""
        quoted = self._quoted(_texts(filter(_is_prompt, new)) - telling(Atom("text", "user", ordered)))
        summaries = set[int]() if is_more else self._summaries(mine, new, quoted)
        if came is not None and came.place in summaries:
            came = None
        if came is None and (rewritten := self._rewritten(new, quoted - summaries)) is not None:
            came = Edge("edits", rewritten)
        if came is not None and not is_more:
            root = self.calls[came.place].root
            later = {i for i in quoted if i > came.place and self._may_sum_up(i)}
            summaries |= {i for i in later if self.calls[i].root != root}
        edges = [] if came is None else [came, *self._returned(mine, new, came)]
        edges += [Edge("compacts", there) for there in sorted(summaries)]
        if any(edge.place in quoted for edge in edges):  # all that it was given stands in its context
            for there in quoted:
                self.calls[there].used = True
        order = None if edges else order
        earlier = self._tried(mine, order)
        if order is not None:
            self._unsure |= set() if is_sure else {place}
            self._begun.setdefault(order.name, place)
            mine.order = order.name
            edges.append(Edge("delegates", order.place))
        if earlier is not None:
            edges.append(Edge("retries", earlier))
        if came is not None:
            self._open.pop(came.place, None)
        for one in new:
            for text in one.texts if one.atom.who != "system" else ():
                self._known.setdefault(text, place)
        return edges

    def _came(self, mine: _Call) -> Edge | None:
        """What the request continues, or else the newest call whose answer its history has."""
        tip = mine.node.tip
        continued = self._answered_at(tip)
        held = {there for one in mine.node.up_to(tip) for there in self._held(one)} - {continued}
        newest = max((one for one in held if continued is None or one > continued), default=None)
        above = tip.up_to(None) if tip is not None else ()
        if newest is not None and all(newest not in one.answered for one in above):
            return Edge("edits", newest)
        if continued is None and mine.call.extends is not None:  # by its tokens
            continued = self._places.get(mine.call.extends)
        return None if continued is None else Edge("continues", continued)

    def _answered_at(self, tip: Node | None) -> int | None:
        """The call that was answered there; of several with equal answers one that nothing continues yet."""
        there = tip.answered if tip is not None else []
        return min(
            there, key=lambda i: (self.calls[i].call.superseded_by is not None, self.calls[i].used), default=None
        )

    def _held(self, node: Node) -> Sequence[int]:
        """The call whose answer an atom of the history is a part of, or is the result for."""
        atom = node.atom
        if atom.kind != "text" and atom.who in self._ids:
            return [self._ids[atom.who]]
        is_answer = atom.kind == "call" or (atom.kind == "text" and atom.who == "assistant")
        return self._answers.get(node.key, [])[-1:] if is_answer and len(atom.what) >= TELLING_ORDER else []

    def _quoted(self, texts: Iterable[str]) -> set[int]:
        """The calls whose answers these texts quote."""
        found = Counter(there for text in texts for there in self._told.get(text, ()))
        return {i for i, n in found.items() if n >= min(QUOTED * len(self.calls[i].told), ENOUGH)}

    def _summaries(self, mine: _Call, new: Sequence[Node], quoted: set[int]) -> set[int]:
        """The answers in words that stand in the prompt while it lacks what they sum up.

        They stand in a text of a user or system, or as the first answer of a history that begins with another text.
        """
        has, found = self._answers_in(mine), set(quoted)
        if len(has) == 1 and (first := next(iter(has))) not in found:
            before = next((one.parent for one in new if self._held(one)), None)
            old = {one.key for one in self.calls[first].node.up_to(None)}
            if before is not None and before.atom.who == "user" and before.key not in old:
                found |= {first}
        lacks = set(range(len(self.calls) if found else 0)) - has
        return {i for i in found if self._may_sum_up(i) and not lacks.isdisjoint(self._answers_in(self.calls[i]))}

    def _may_sum_up(self, there: int) -> bool:
        """Whether an answer may be a summary: in words, to a question of its own or under another system prompt."""
        one = self.calls[there]
        asked = any(map(_is_prompt, one.node.up_to(one.node.tip))) or any(edge.kind == "edits" for edge in one.edges)
        return one.is_final and not one.kept and asked

    def _answers_in(self, one: _Call) -> set[int]:
        if one.has is None:
            above = [*one.node.up_to(None)]
            one.has = {there for node in above for there in (*self._held(node), *node.answered)}
            one.has |= self._quoted(_texts(filter(_is_prompt, above)))
        return one.has

    def _rewritten(self, new: Sequence[Node], quoted: set[int]) -> int | None:
        """The newest call that is quoted together with something that calls of its context were asked or got.

        One whose answer was the last of its context may be a critic's, or a summary: with a message that it had, too.
        """
        texts = _texts(one for one in new if one.atom.who not in ("system", "assistant"))
        known = {self._known[text] for text in texts if text in self._known and text not in self._told}
        around = {self.calls[there].root for there in known}
        shown = {one.atom.what for one in new if one.atom.who == "user"}
        asked = "\n".join(shown)

        def may_be(there: int) -> bool:
            one = self.calls[there]
            own = [above.atom.what for above in one.node.up_to(None) if above.atom.who == "user"]
            if one.kept or not one.is_final:
                return one.root in around or any(len(text) >= TELLING_ORDER and text in asked for text in own)
            return not shown.isdisjoint(own)

        by_context = defaultdict[int, list[int]](list)
        for there in sorted(quoted, reverse=True):
            by_context[self.calls[there].root].append(there)
        return next((quoted[0] for quoted in [*by_context.values()][:NEWEST] if any(map(may_be, quoted))), None)

    def _returned(self, mine: _Call, new: Sequence[Node], came: Edge) -> Iterator[Edge]:
        """The answers of other contexts that are results here."""
        found = set[int]()
        for one in new:
            made_by = self._ids.get(one.atom.who, came.place)
            if one.atom.kind == "text" and one.atom.who == "user":
                yield from (Edge("returns", there) for there in self._reported(one, came.place))
            if one.atom.kind != "result" or made_by != came.place:
                continue
            there = self._answer_in(one, mine, came.place, found)
            self._settle(one.atom.who, there)
            if there is not None and not (came.kind == "edits" and self.calls[there].used):
                found.add(there)
                began = self.calls[self.calls[there].root]
                if not began.edges:  # the order was not found in its prompt
                    began.edges = [Edge("delegates", came.place)]
                yield Edge("returns", there)

    def _reported(self, message: Node, caller: int) -> Iterator[int]:
        """The last answers of sub-agents of this context that a user's message quotes: they worked beside it."""
        for there in sorted(self._quoted(message.texts)):
            root = self.calls[there].root
            began = {self.calls[edge.place].root for edge in self.calls[root].edges if edge.kind == "delegates"}
            if self.calls[caller].root in began and self._last[root] == there and self.calls[there].is_final:
                yield there

    def _settle(self, tool_call_id: str, answer: int | None) -> None:
        """Drop a context's doubtful edge to a tool call whose result is not its answer."""
        root = self._begun.get(tool_call_id)
        if root in self._unsure and (answer is None or self.calls[answer].root != root):
            self.calls[root].edges = [edge for edge in self.calls[root].edges if edge.kind != "delegates"]

    def _answer_in(self, result: Node, mine: _Call, caller: int, found: Container[int]) -> int | None:
        """The answer that a result is: of the context that its tool call began, where that is known."""
        what = result.atom.what.strip()
        if (root := self._begun.get(result.atom.who)) is not None:
            text = self.calls[last := self._last[root]].text.strip()
            if text and (text in what or (len(what) >= BY_NAME and text.endswith(what))):
                return last
        alike = {*self._quoted(result.texts)}
        if len(what) >= TELLING_ORDER:
            alike.update(self._answers.get(Atom("text", "assistant", what).key, []))
        root, until = self.calls[caller].root, mine.call.started_at + CLOCK_S
        others = [(one.used, i) for i in alike if i > caller and i not in found and (one := self.calls[i]).is_final
                  and one.root != root and one.ended <= until]  # fmt: skip
        return min(others, default=(False, None))[1]

    def _order_of(self, mine: _Call, new: Sequence[Node]) -> tuple[_Order | None, bool]:
        """The tool call that gave this new context its order, of several one that began none; whether that is sure."""
        asked = "\n".join(one.atom.what for one in new if one.atom.kind == "text" and one.atom.who == "user")
        for is_sure in (True, False):
            orders = (
                self._orders.get(asked, [])
                if is_sure
                else chain.from_iterable(islice(reversed(self._open.values()), NEWEST))
            )
            found = [order for order in orders if self._gave(order, mine, asked, is_sure)]
            if found:
                return min(found, key=lambda order: (order.name in self._begun, -order.place)), is_sure
        return None, True

    def _gave(self, order: _Order, mine: _Call, asked: str, is_sure: bool) -> bool:
        """Whether an order stands in a prompt: surely, if it is all that is asked."""
        caller, begun = self.calls[order.place], self._begun.get(order.name)
        is_taken = begun is not None and begun not in mine.attempts
        if (is_taken and not is_sure) or caller.ended > mine.call.started_at + CLOCK_S:
            return False
        by_name = None not in (mine.call.agent, caller.call.agent) and mine.call.agent != caller.call.agent
        is_other = by_name or _first(mine.node) is not _first(caller.node)
        texts = [text for text in order.texts if len(text) >= (BY_NAME if by_name else TELLING_ORDER)]
        return asked in texts if is_sure else is_other and any(text in asked for text in texts)

    def _tried(self, mine: _Call, order: _Order | None) -> int | None:
        """The call that this one repeats: it failed, or its answer is not used, and no other order began it."""
        for there in reversed(mine.attempts[:-1]):
            one = self.calls[there]
            is_over = one.call.status != "incomplete" and one.ended <= mine.call.started_at + CLOCK_S
            is_same = order is None or order.name in self._begun
            if one.call.superseded_by is not None or (is_over and (not one.said or (is_same and not one.used))):
                return there
        return None

    def _remember(self, mine: _Call, place: int) -> None:
        """Keep what a later context may have of the answer."""
        told = set[str]()
        for position, atom in enumerate(mine.said):
            told |= {text for text in telling(atom) if text not in self._known}
            if len(atom.what) >= TELLING_ORDER:
                self._answers[atom.key].append(place)
            if atom.kind == "call":
                if is_unique(atom.who):
                    self._ids[atom.who] = place
                name = atom.who if is_unique(atom.who) else f"{place}/{position}"
                order = _Order(place, name, tuple(strings(parsed(atom.what))))
                self._open[place].append(order)
                for text in order.texts:
                    self._orders[text].append(order)
        mine.told = frozenset(told)
        for text in told:
            self._told[text].append(place)


def _is_prompt(node: Node) -> bool:
    return node.atom.kind == "text" and node.atom.who != "assistant"


def _texts(nodes: Iterable[Node]) -> set[str]:
    return {text for node in nodes for text in node.texts}


def _first(node: Node) -> Node:
    """The first node below the root."""
    *_, first = [node, *node.up_to(None)]
    return first


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


def keyed(atoms: Iterable[Atom]) -> list[KeyedAtom]:
    """Return the atoms with their keys."""
    return [(atom.key, atom) for atom in atoms]


def telling(atom: Atom) -> frozenset[str]:
    """Return the texts of an atom by which a quotation of it is known: pieces of it, what a tool call says, its id."""
    said = [*strings(parsed(atom.what))] if atom.kind == "call" else [ends_of(atom.what)]
    pieces = {piece for text in said for piece in fragments(text)}
    return frozenset(pieces | {atom.who} if atom.kind == "call" and is_unique(atom.who) else pieces)


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


def graph_of(calls: Sequence[ModelCall]) -> Graph | None:
    """Return the graph of a rollout's calls, which are in order; None if they cannot be read."""
    graph = Graph()
    try:
        for call in calls:
            graph.add(call)
    except Exception:  # the rollout is shown and trained on whatever its requests look like
        log.exception("rollout %s: its contexts are not known", calls[0].rollout_id)
        return None
    return graph
