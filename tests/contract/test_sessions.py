"""Sessions of agent programs, real ones and played ones: which calls are one run, and the edges between them.

`sessions/real.jsonl` has what real programs sent to a scripted model, with every word replaced by its digest; each
call has its messages by place. The edges were made by reading the sessions. `sessions/played.txt` has played ones.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import CHAT, Json, Scripted, together

pytestmark = pytest.mark.feature("contexts")

Edge = tuple[str, int]
HERE = Path(__file__).parent / "sessions"
# How much of it is found at least without a name.
RECALL = {"one rollout": 0.9, "continues": 1, "delegates": 0.9, "returns": 0.9, "edits": 0.95, "compacts": 0.8}
WORDS = [
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lemur", "mango",
    "nadir", "ocean", "pearl", "quartz", "river", "summit", "tundra", "umber", "valley", "willow", "yonder", "zephyr",
]  # fmt: skip


@dataclass
class SessionCall:
    """A call of a session. `answer`: a message, or an error's status. `edges`: to other calls, by their places."""

    messages: list[Json]
    answer: Any
    edges: set[Edge] = field(default_factory=set)
    run: str = "a"
    headers: dict[str, str] = field(default_factory=dict)
    with_last: bool = False
    rejected: bool = False


@dataclass
class Session:
    label: str
    calls: list[SessionCall]
    apart: list[int] = field(default_factory=list)  # calls that nothing in their text ties to the run


def recorded(path: Path) -> Iterator[Session]:
    """Read sessions of real programs, a line each; their calls have their messages by place."""
    for line in path.read_text().splitlines():
        one = json.loads(line)
        calls = [
            SessionCall([one["messages"][i] for i in c["sees"]], c["answer"] or 503, edges_of(c["edges"]))
            for c in one["calls"]
        ]
        for call in calls:
            call.headers["Authorization"] = f"Bearer {one['label']}"
        yield Session(one["label"], calls, one.get("apart_when_unnamed", []))


def edges_of(text: str) -> set[Edge]:
    words = text.split()
    return {(kind, int(place)) for kind, place in zip(words[::2], words[1::2], strict=True)}


def played(path: Path) -> Iterator[Session]:
    """Read the sessions of played programs; `played.txt` says how they are written."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for block in text.strip().split("\n\n"):
        label, *lines = block.splitlines()
        session = Session(label, [])
        for line in lines:
            session.calls.append(_Line(session, line).call())
        yield session


class _Line:
    def __init__(self, session: Session, line: str) -> None:
        self.session, self.calls = session, session.calls
        number, rest = line.split(maxsplit=1)
        assert int(number) == len(self.calls), line
        asked, said = rest.split("->")
        self.asked, (self.said, _, edges) = asked.split(), said.partition("|")
        self.thrown = "^" in said
        self.edges = edges_of(edges.replace("^", ""))

    def call(self) -> SessionCall:
        call = SessionCall([], None, self.edges, rejected=self.thrown)
        for word in self.asked:
            match word[0]:
                case "=":
                    call.run = word[1:]
                case "%":
                    call.headers["Authorization"] = f"Bearer {word[1:]}"
                case "@":
                    call.headers["X-Agent-Name"] = word[1:]
                case "~":
                    call.headers["x-stainless-retry-count"] = "1"
                case "$":  # as Claude Code names a sub-agent, and who began it
                    names = ("x-claude-code-agent-id", "x-claude-code-parent-agent-id")
                    call.headers |= dict(zip(names, word[1:].split("<"), strict=False))
                case "*":
                    call.headers["x-openai-subagent"] = word[1:]
                case "&":
                    call.with_last = True
                case _:
                    call.messages += self.messages(word)
        call.answer = self.answer(self.said.replace("^", "").split())
        return call

    def messages(self, word: str) -> list[Json]:
        kind, _, text = word.partition(":")
        if kind in ("s", "u"):
            return [{"role": {"s": "system", "u": "user"}[kind], "content": self.text(text)}]
        place, _, position = kind[1:].partition(".")
        of = self.calls[int(place)]
        if kind[0] == "r":
            called = of.answer["tool_calls"][int(position or 0)]
            return [{"role": "tool", "tool_call_id": called["id"], "content": self.text(text)}]
        asked = of.messages[1:] if self.asked[0].startswith("s:") and kind[0] == "x" else of.messages
        return [*(asked if kind[0] in "x+" else []), *([of.answer] if kind[0] in "a+" else [])]

    def text(self, words: str) -> str:
        return "\n\n".join(self.piece(*one) for one in re.findall(r"\[(\d+)\]|\(([\d.]+)\)|([\w-]+)", words))

    def piece(self, quoted: str, ordered: str, word: str) -> str:
        if quoted:
            return str(self.calls[int(quoted)].answer["content"])
        if ordered:
            place, _, position = ordered.partition(".")
            called = self.calls[int(place)].answer["tool_calls"][int(position or 0)]
            return str(json.loads(called["function"]["arguments"])["q"])
        return self.sentence(word)

    def sentence(self, word: str) -> str:
        source = random.Random(f"{self.session.label} {word}")
        return " ".join([word, *source.choices(WORDS, k=8)]) + "."

    def answer(self, words: list[str]) -> Any:
        if words[0].startswith("!"):
            return int(words[0][1:])
        source = f"{len(self.calls)}"
        said = " ".join(self.sentence(f"answer-{source}-{i}") for i in range(3)) if words[0] == "say" else None
        calls = []
        for position, word in enumerate(words[1:]):
            name, _, order = word.rstrip(")").partition("(")
            made = random.Random(f"{self.session.label} {source} {position} {word}").randbytes(12).hex()
            function = {"name": name, "arguments": json.dumps({"q": self.text(order)})}
            calls.append({"id": f"call_{made}", "type": "function", "function": function})
        return {"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True)
class Replayed:
    """How a session was recorded: each call's rollout, the edges that were found, and the rejected calls."""

    rollouts: list[str]
    edges: list[set[Edge]]
    rejected: set[int]


def replay(model: Scripted, session: Session, prefix: str | None = None) -> Replayed:
    """Send a session's calls through a proxy. With `prefix` each run's rollout is named, else none is."""

    def ask(call: SessionCall, answer: Any) -> tuple[str, str]:
        named = {} if prefix is None else {"X-Rollout-Id": f"{prefix}-{call.run}"}
        got = model.ask(CHAT, {"messages": call.messages}, answer, **named, **call.headers)
        return got.headers["x-rollout-id"], got.headers["x-call-id"]

    found: list[tuple[str, str]] = []
    starts = [place for place, call in enumerate(session.calls) if not call.with_last]
    with ThreadPoolExecutor(4) as pool:
        for start, end in zip(starts, [*starts[1:], len(session.calls)], strict=True):
            # They take longer than clocks may differ: the edges go by the calls' times.
            answered = together(end - start, 0.1 if end - start > 1 else 0)
            found += pool.map(ask, session.calls[start:end], [answered(c.answer) for c in session.calls[start:end]])
    places = {call_id: place for place, (_, call_id) in enumerate(found)}
    edges, rejected = [set[Edge]() for _ in found], set[int]()
    for rollout in dict.fromkeys(rollout for rollout, _ in found):
        for call in model.proxy.get(f"/rollouts/{rollout}")["calls"]:
            place = places[call["call_id"]]
            edges[place] = {(one["edge"], places.get(one["call_id"], -1)) for one in call["contexts"]}
            rejected |= {place} if call["rejected"] else set()
    return Replayed([rollout for rollout, _ in found], edges, rejected)


SESSIONS = [*recorded(HERE / "real.jsonl"), *played(HERE / "played.txt")]


def test_the_edges_of_a_session_are_those_that_its_program_made(model: Scripted) -> None:
    for session in SESSIONS:
        found = replay(model, session, uuid.uuid4().hex)
        expected = [sorted(call.edges) for call in session.calls]
        assert [sorted(edges) for edges in found.edges] == expected, session.label
        assert found.rejected == {i for i, call in enumerate(session.calls) if call.rejected}, session.label


def test_unnamed_sessions_at_the_same_time_are_told_apart(model: Scripted) -> None:
    """All at once: played programs with one key, real ones, which have texts in common, with keys of their own.

    What is found without a name is right, and most of it is found. Runs of different programs or users are never one.
    """
    sessions = [one for one in SESSIONS if "named by" not in one.label]  # by headers: in text little ties these
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda session: replay(model, session), sessions))
    runs, table = dict[str, set[tuple[str, str]]](), Table()
    for session, replayed in zip(sessions, found, strict=True):
        for i, call in enumerate(session.calls):
            runs.setdefault(replayed.rollouts[i], set()).add((session.label, call.run))
            for edge in replayed.edges[i] | call.edges:
                table.note(edge[0], edge in replayed.edges[i], edge in call.edges)
            for j in set(range(i)) - {*session.apart}:
                together = replayed.rollouts[i] == replayed.rollouts[j]
                table.note("one rollout", together, call.run == session.calls[j].run)
    assert [names for names in runs.values() if len(names) > 1] == []
    assert not +table.wrong, table
    assert {name: table.recall(name) >= least for name, least in RECALL.items()} == dict.fromkeys(RECALL, True), table


@dataclass
class Table:
    """What was found, wrongly found, and missed, by name."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)

    def note(self, name: str, is_found: bool, is_there: bool) -> None:
        self.right[name] += is_found and is_there
        self.wrong[name] += is_found and not is_there
        self.missed[name] += is_there and not is_found

    def recall(self, name: str) -> float:
        return self.right[name] / (self.right[name] + self.missed[name])
