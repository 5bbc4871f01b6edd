"""Finds where the context of each call of a rollout comes from: its edges to earlier calls. Does no I/O.

`continues`   the call's request begins with the earlier call's request and answer
`edits`       the call's history contains the earlier call's answer, but was changed
`compacts`    the earlier call's answer is in the call's prompt, in place of history that is no longer there
`delegates`   a tool call of the earlier call started the call, in a new context
`returns`     a tool result or a user message in the call's request has the earlier call's answer, from another context
`retries`     the earlier call had the same request, and it failed or its answer was not used

Headers in which an agent's program names its threads (Claude Code, Codex) take precedence over what texts show.

A call without edges begins a new context, or the origin of its context is uncertain.

The conversations of all calls form one tree, in which contexts share their common beginning. Requests are read as
differences from their parents' requests, so building the tree takes time linear in the rollout's content.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from ...core.json_text import dumps
from ...core.records import ModelCall
from ...core.tools import conversation
from ...proxy.dialects.atoms import (
    TELLING,
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
NEWEST = 20  # contexts, or calls, that are compared: whether a prompt is their history, rewritten, or has their order
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


class Edge(NamedTuple):
    """An edge to another call. `place`: that call's index in the rollout."""

    kind: Kind
    place: int


class _Order(NamedTuple):
    """A tool call that may have started a sub-agent, with its arguments' texts. `name`: its id, or a made-up one."""

    by: _Call
    name: str
    texts: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Call:
    """A call, prepared for comparison with later calls.

    `fields`: its whole request, which ends at `node`. `first`: the node before its conversation. `nodes`: the last node
    of each message. `attempts`: the calls with the same request. `order`: the tool call that probably started it.
    `is_ordered`: whether a header or a distinctive part of its prompt shows this. `root`: the first call of its
    context. `told`: texts that first appear in its answer. `used`: whether a later context has its answer. `kept`:
    whether it has it as history. `has`: the calls whose answers are in its request, once this is known.
    """

    call: ModelCall
    place: int
    fields: Json
    first: Node
    nodes: list[Node]
    node: Node
    attempts: list[_Call] = field(default_factory=list)
    root: _Call = field(init=False)
    order: _Order | None = None
    is_ordered: bool = False
    edges: list[Edge] = field(default_factory=list)
    said: list[Atom] = field(default_factory=list)
    told: frozenset[str] = frozenset()
    used: bool = False
    kept: bool = False
    has: set[_Call] | None = None

    def __post_init__(self) -> None:
        self.root = self

    def says(self, name: Literal["thread", "parent", "kind"]) -> str | None:
        return (self.call.harness or {}).get(name)

    @property
    def form(self) -> str | None:
        """The fields that say which answer is wanted, as JSON; None if the conversation is empty or on the server."""
        is_whole = self.node is not self.first and "conversation" not in self.fields
        return dumps([self.fields.get(name) for name in FORM]) if is_whole else None

    @property
    def ended(self) -> float:
        return self.call.started_at + (self.call.latency_ms or 0.0) / 1000

    def is_over_for(self, later: _Call) -> bool:
        return self.ended <= later.call.started_at + CLOCK_S

    @property
    def text(self) -> str:
        return "".join(atom.what for atom in self.said if atom.kind == "text").strip()

    @property
    def is_final(self) -> bool:
        return bool(self.said) and all(atom.kind == "text" for atom in self.said)

    @property
    def may_sum_up(self) -> bool:
        """Whether its answer may be a summary: it is a text, follows a new prompt and is in no later history."""
        return self.is_final and not self.kept and any(map(_is_prompt, self.node.up_to(self.node.tip)))


_PLACE = attrgetter("place")


class Graph:
    """The calls of a rollout and their edges. Add calls in order."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._root = Node(None, ("", "", ""), Atom("", "", ""))
        self._read: dict[int, tuple[Any, list[KeyedAtom]]] = {}  # messages that calls share, read once
        self._responses: dict[str, Node] = {}  # by the ids that requests of Responses continue
        self._by_id: dict[str, _Call] = {}
        self._again: dict[str, _Call] = {}  # the call that a client sent again, by the call that it sent
        self._asked: defaultdict[tuple[object, ...], list[_Call]] = defaultdict(list)  # the calls with each request
        self._made: dict[str, _Call] = {}  # the call that made each tool call
        self._answers: dict[Key, _Call] = {}  # the newest
        self._told: defaultdict[str, list[_Call]] = defaultdict(list)
        self._known: dict[str, _Call] = {}  # texts of requests, and the first call that had them
        self._orders: defaultdict[str, list[_Order]] = defaultdict(list)  # by their texts
        self._given: list[list[_Order]] = []  # of each call that gave some
        self._begun: dict[str, _Call] = {}  # the call that each of these tool calls began
        self._last: dict[_Call, _Call] = {}  # the last call of each context, by its root
        self._threads: dict[str | None, _Call] = {}  # the last call of each thread

    def add(self, call: ModelCall) -> None:
        mine = self._placed(call)
        mine.attempts = self._attempts(mine)
        mine.attempts.append(mine)
        self.calls.append(mine)
        self._by_id[call.call_id] = mine
        if call.superseded_by is not None:
            self._again[call.superseded_by] = mine
        mine.edges = self._edges(mine)
        for kind, place in mine.edges:
            there = self.calls[place]
            there.used |= kind not in ("delegates", "retries")
            there.kept |= kind in ("continues", "edits")
            if kind in SAME and mine.root is mine:
                mine.root = there.root
        if mine.root is not mine and mine.root.is_ordered:
            self._delegate(mine.root)
        self._last[mine.root] = self._threads[mine.says("thread")] = mine
        self._answer(mine)
        self._remember(mine)

    def rejected(self) -> dict[int, int]:
        """Map each rejected call's index to that of the attempt used instead. No later context has the rejected answer.

        That attempt has the same request, and began later or was still running. A call that began after it had ended
        is a fresh start. Calls that different tool calls started are not attempts at the same thing.
        """
        found, alike = dict[int, int](), defaultdict[tuple[_Call, _Order | None], list[_Call]](list)
        for one in self.calls:
            if one.said and len(one.attempts) > 1:
                alike[one.attempts[0], one.order].append(one)
        for answered in alike.values():
            if not (used := [one for one in answered if one.used]):
                continue
            stands = [[atom.key for atom in one.said] for one in used]
            last, until = used[-1].place, max(one.ended for one in used)
            for one in answered:
                is_tried = one.place < last or one.call.started_at < until
                if is_tried and [atom.key for atom in one.said] not in stands:
                    found[one.place] = last
        return found

    def summaries(self) -> set[int]:
        """Return the indices of the calls whose answers replace history in a later prompt."""
        return {there for one in self.calls for kind, there in one.edges if kind == "compacts"}

    def _attempts(self, mine: _Call) -> list[_Call]:
        """Earlier attempts: those of the call that the client sent again, or else calls with the same request."""
        if (earlier := self._again.get(mine.call.call_id)) is not None:
            return earlier.attempts
        form = mine.form
        return [] if form is None else self._asked[mine.node, mine.call.agent, mine.says("thread"), form]

    def _placed(self, call: ModelCall) -> _Call:
        of = call.request_of or {}
        parent = self._by_id.get(str(of.get("call_id")))
        fields = dict(call.request)
        if parent is not None:
            fields |= {name: begun(parent.fields[name], of[name], fields[name]) for name in of.keys() & fields.keys()}
        first = self._responses.get(str(fields.get("previous_response_id")))
        first = first or self._root.then(keyed(request_atoms({name: fields.get(name) for name in SYSTEM})))
        nodes = list[Node]()
        if parent is not None and parent.first is first:
            nodes = parent.nodes[: of.get("messages" if "messages" in fields else "input", 0)]
        node = nodes[-1] if nodes else first
        for message in conversation(fields)[len(nodes) :]:
            if (read := self._read.get(id(message))) is None:
                read = self._read[id(message)] = message, keyed(item_atoms(message))
            node = node.then(read[1])
            nodes.append(node)
        whole = (Atom("text", "user", fields[name]) for name in WHOLE if isinstance(fields.get(name), str))
        return _Call(call, len(self.calls), fields, first, nodes, node.then(keyed(whole)))

    def _answer(self, mine: _Call) -> None:
        """Add a call's answer to the tree, with and without its thoughts: a later request may contain either."""
        call, node = mine.call, mine.node
        response = call.response if call.status == "ok" and isinstance(call.response, dict) else {}
        said = [answer for answer in answer_atoms(response) if answer]
        for answer in said:
            plain = [one._replace(what=without_thoughts(one.what)) if one.kind == "text" else one for one in answer]
            for way in (answer, [one for one in plain if one.what or one.kind == "call"]):
                end = node.then(keyed(way))
                end.tip = end
                if mine not in end.answered:
                    end.answered.append(mine)
        if said:
            mine.said = said[0]
        if said and isinstance(name := response.get("id"), str):
            self._responses[name] = node.then(keyed(mine.said))

    def _edges(self, mine: _Call) -> list[Edge]:
        """The call's edges. Also notes its starter, the answers that it uses and its new texts."""
        continued, held = self._history(mine)
        came = Edge("continues", continued.place) if continued is not None and not held else None
        new = [*mine.node.up_to(None if came is None else mine.node.tip)][::-1]
        asked = "\n".join(one.atom.what for one in new if _is_asked(one))
        order, size = self._order_of(mine, asked) if continued is None and not held else (None, 0)
        ordered = "\n".join(order.texts) if order is not None else ""
        quoted = self._quoted(_texts(filter(_is_prompt, new)) - telling(Atom("text", "user", ordered)))
        summaries = set[_Call]()
        if came is None:
            summaries = self._summaries(mine, new, quoted)
            last = self._threads.get(mine.says("thread"))
            if last is not None and last.says("kind") == "compact" != mine.says("kind"):
                summaries.add(last)
            history = max(held - summaries, key=_PLACE, default=continued) or self._rewritten(new, quoted - summaries)
            if history is not None:
                came = Edge("edits", history.place)
                later = {one for one in quoted if one.place > history.place and one.may_sum_up}
                summaries |= {one for one in later if one.root is not history.root}
        edges = [] if came is None else [came, *self._returned(mine, new, came)]
        edges += [Edge("compacts", one.place) for one in sorted(summaries, key=_PLACE)]
        if any(self.calls[edge.place] in quoted for edge in edges):  # all that it was given stands in its context
            for one in quoted:
                one.used = True
        order = None if edges else order
        is_begun = mine.says("parent") is not None and mine.says("thread") not in self._threads
        earlier = self._tried(mine, order)
        if order is not None:
            self._begun.setdefault(order.name, mine)
            mine.order, mine.is_ordered = order, size >= TELLING or is_begun
            if is_begun or size == len(asked) >= TELLING_ORDER:
                edges.append(Edge("delegates", order.by.place))
        if earlier is not None:
            edges.append(Edge("retries", earlier.place))
        for node in new:
            for text in node.texts:
                self._known.setdefault(text, mine)
        return edges

    def _history(self, mine: _Call) -> tuple[_Call | None, set[_Call]]:
        """The call that the request continues, or None; and the calls after it whose answers the request contains."""
        tip = mine.node.tip
        there = tip.answered if tip is not None else []

        def unlike(one: _Call) -> tuple[bool, ...]:  # of several with equal answers, one that nothing continues yet
            return one.call.superseded_by is not None, one.says("thread") != mine.says("thread"), one.used

        continued = min(there, key=unlike, default=None)
        held = {one for node in mine.node.up_to(tip) if (one := self._held(node)) is not None}
        if continued is None and not held and mine.call.extends is not None:  # by its tokens
            continued = self._by_id.get(mine.call.extends)
        return continued, {one for one in held if continued is None or one.place > continued.place}

    def _held(self, node: Node) -> _Call | None:
        """The call whose answer has this atom, or the tool call that this atom is the result of; None if unknown."""
        atom = node.atom
        if atom.kind != "text" and atom.who in self._made:
            return self._made[atom.who]
        is_answer = atom.kind == "call" or (atom.kind == "text" and atom.who == "assistant")
        return self._answers.get(node.key) if is_answer and len(atom.what) >= TELLING_ORDER else None

    def _quoted(self, texts: Iterable[str]) -> set[_Call]:
        """The calls with answers that these texts quote."""
        found = Counter(one for text in texts for one in self._told.get(text, ()))
        return {one for one, n in found.items() if n >= min(QUOTED * len(one.told), ENOUGH)}

    def _summaries(self, mine: _Call, new: Sequence[Node], quoted: set[_Call]) -> set[_Call]:
        """The calls that may be summaries: the prompt has their answers, but not all the answers that they had read.

        Such an answer is in a user or system message, or is the first answer of a history with a different beginning.
        """
        has, found = self._answers_in(mine), set(quoted)
        first = next((node for node in new if self._held(node)), None)
        if first is not None and (before := first.parent) is not None and before.atom.who == "user":
            one = self._held(first)
            if one is not None and before.key not in {node.key for node in one.node.up_to(None)}:
                found.add(one)
        return {one for one in found if one.may_sum_up and self._answers_in(one) - has - {mine}}

    def _answers_in(self, one: _Call) -> set[_Call]:
        if one.has is None:
            above = [*one.node.up_to(None)]
            one.has = self._quoted(_texts(filter(_is_prompt, above)))
            for node in above:
                held = self._held(node)
                one.has |= {*node.answered, *([held] if held is not None else [])}
        return one.has

    def _rewritten(self, new: Sequence[Node], quoted: set[_Call]) -> _Call | None:
        """The newest quoted call of the newest context from which the prompt quotes more than answers, or None.

        If an answer ended its context, it may be a critique or a summary. Then the prompt must also have a user message
        of that context.
        """
        texts = _texts(one for one in new if one.atom.who not in ("system", "assistant"))
        around = {self._known[text].root for text in texts if text in self._known and text not in self._told}
        shown = {one.atom.what for one in new if one.atom.who == "user"}
        asked = "\n".join(shown)

        def may_be(one: _Call) -> bool:
            own = [above.atom.what for above in one.node.up_to(None) if above.atom.who == "user"]
            if one.kept or not one.is_final:
                return one.root in around or any(len(text) >= TELLING_ORDER and text in asked for text in own)
            return not shown.isdisjoint(own)

        by_context = defaultdict[_Call, list[_Call]](list)
        for one in sorted(quoted, key=_PLACE, reverse=True):
            by_context[one.root].append(one)
        return next((found[0] for found in [*by_context.values()][:NEWEST] if any(map(may_be, found))), None)

    def _returned(self, mine: _Call, new: Sequence[Node], came: Edge) -> Iterator[Edge]:
        """Edges to answers from other contexts that new tool results and user messages contain.

        A tool result has the answer of the context that its tool call started, if known, or else an answer given after
        the tool call. A user message can only quote answers of sub-agents that this context started.
        """
        caller, found = self.calls[came.place], set[_Call]()
        for node in new:
            is_result = node.atom.kind == "result" and self._made.get(node.atom.who, caller) is caller
            if not is_result and not _is_asked(node):
                continue
            answers = list[_Call]()
            for one in sorted(self._quoted(node.texts), key=_PLACE):
                is_ours = one.root.order is not None and one.root.order.by.root is caller.root
                is_others = one not in found and one.root is not caller.root and one.is_final and one.is_over_for(mine)
                if is_others and (one.place > caller.place if is_result else is_ours):
                    answers.append(one)
            if is_result:
                answers = self._ordered(node.atom) or sorted(answers, key=attrgetter("used"))[:1]
            for one in answers:
                if came.kind == "edits" and one.used:
                    continue
                found.add(one)
                self._delegate(one.root, caller)
                yield Edge("returns", one.place)

    def _delegate(self, root: _Call, caller: _Call | None = None) -> None:
        """Add an edge from a context to the call that started it, unless the context's first call has edges."""
        by = caller if root.order is None else root.order.by
        if by is not None and not root.edges:
            root.edges = [Edge("delegates", by.place)]

    def _ordered(self, result: Atom) -> list[_Call]:
        """The last call of the context that a result's tool call started, if the result shows that call's answer."""
        if (root := self._begun.get(result.who)) is None:
            return []
        what, text = result.what.strip(), self._last[root].text
        is_same = text and (text in what or (len(what) >= BY_NAME and text.endswith(what)))
        return [self._last[root]] if is_same else []

    def _order_of(self, mine: _Call, asked: str) -> tuple[_Order | None, int]:
        """The tool call that probably started this context, or None; and the length of its text in the prompt.

        A tool call that has not started a context yet is preferred. The match is certain if its text is the whole
        prompt; if the text is a part, later calls must confirm the match. If headers name the thread's parent, only
        tool calls of that parent match, whatever the prompt shows.
        """
        parent = mine.says("parent")

        def may_be(order: _Order) -> bool:
            return order.by.is_over_for(mine) and parent in (None, order.by.says("thread") or "")

        whole = self._orders[asked] if len(asked) >= TELLING_ORDER else []
        given = [(len(asked), one) for one in whole if may_be(one)]
        for one in chain.from_iterable(self._given[: -NEWEST - 1 : -1]) if not given else ():
            size = max((len(text) for text in one.texts if text in asked), default=0)
            if (size >= BY_NAME or parent is not None) and may_be(one):
                given.append((size, one))
        if not given:
            return None, 0
        size, order = max(given, key=lambda found: (found[1].name not in self._begun, found[0], found[1].by.place))
        return order, size

    def _tried(self, mine: _Call, order: _Order | None) -> _Call | None:
        """The newest earlier attempt that was sent again, failed or has an unused answer; None if there is none."""
        is_same = order is None or order.name in self._begun
        for one in reversed(mine.attempts[:-1]):
            is_over = one.call.status != "incomplete" and one.is_over_for(mine)
            if one.call.superseded_by is not None or (is_over and (not one.said or (is_same and not one.used))):
                return one
        return None

    def _remember(self, mine: _Call) -> None:
        """Remember the parts of the answer that a later context may contain."""
        told, given = set[str](), list[_Order]()
        for position, atom in enumerate(mine.said):
            told |= {text for text in telling(atom) if text not in self._known}
            if len(atom.what) >= TELLING_ORDER:
                self._answers[atom.key] = mine
            if atom.kind == "call":
                name = atom.who if is_unique(atom.who) else f"{mine.place}/{position}"
                self._made[name] = mine
                given.append(_Order(mine, name, tuple(strings(parsed(atom.what)))))
        if given:
            self._given.append(given)
        for order in given:
            for text in order.texts:
                self._orders[text].append(order)
        mine.told = frozenset(told)
        for text in told:
            self._told[text].append(mine)


def _is_prompt(node: Node) -> bool:
    return node.atom.kind == "text" and node.atom.who != "assistant"


def _is_asked(node: Node) -> bool:
    return node.atom.kind == "text" and node.atom.who == "user"


def _texts(nodes: Iterable[Node]) -> set[str]:
    return {text for node in nodes for text in node.texts}


class Node:
    """A node of the tree: an atom in a context, after its predecessors.

    `answered`: the calls with an answer that ends here. `texts`: what `telling` finds in the atom.
    `tip`: the nearest node, from here towards the root, that ends an answer.
    """

    __slots__ = ("answered", "atom", "key", "kids", "parent", "texts", "tip")

    def __init__(self, parent: Node | None, key: Key, atom: Atom) -> None:
        self.parent, self.key, self.atom = parent, key, atom
        self.texts = telling(atom)
        self.tip: Node | None = None if parent is None else parent.tip
        self.kids: dict[Key, Node] = {}
        self.answered: list[_Call] = []

    def then(self, atoms: Iterable[KeyedAtom]) -> Node:
        """Return the node that these atoms lead to, adding nodes as needed."""
        node = self
        for key, atom in atoms:
            if (kid := node.kids.get(key)) is None:
                kid = node.kids[key] = Node(node, key, atom)
            node = kid
        return node

    def up_to(self, above: Node | None) -> Iterator[Node]:
        """Yield the nodes from here towards the root, up to but excluding `above` (None: the root)."""
        node = self
        while node is not above and node.parent is not None:
            yield node
            node = node.parent


def keyed(atoms: Iterable[Atom]) -> list[KeyedAtom]:
    return [(atom.key, atom) for atom in atoms]


def telling(atom: Atom) -> frozenset[str]:
    """Return texts by which a quotation of the atom is recognised: pieces of it, and a tool call's unique id."""
    said = [*strings(parsed(atom.what))] if atom.kind == "call" else [ends_of(atom.what)]
    pieces = {piece for text in said for piece in fragments(text)}
    return frozenset(pieces | {atom.who} if atom.kind == "call" and is_unique(atom.who) else pieces)


def graph_of(calls: Sequence[ModelCall]) -> Graph | None:
    """Return the graph of a rollout's calls (in order); None if they cannot be read."""
    graph = Graph()
    try:
        for call in calls:
            graph.add(call)
    except Exception:  # the rollout is shown and trained on whatever its requests look like
        log.exception("the contexts of rollout %s cannot be determined", calls[0].rollout_id)
        return None
    return graph
