"""Sessions of agent programs: what they ask, call by call, what is answered, and the edges that the program made."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.scripted import Proxy

Json = dict[str, Any]
Edge = tuple[str, int]
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
        yield Session(one["label"], calls)


def edges_of(text: str) -> set[Edge]:
    words = text.split()
    return {(kind, int(place)) for kind, place in zip(words[::2], words[1::2], strict=True)}


def played(path: Path) -> Iterator[Session]:
    """Read the sessions of played programs; `scenarios.txt` says how they are written."""
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


async def replay(proxy: Proxy, session: Session, prefix: str | None = None) -> Replayed:
    """Send a session's calls through a proxy. With `prefix` each run's rollout is named, else none is."""
    found: list[tuple[str, str]] = []

    async def ask(place: int, call: SessionCall, wait: str) -> tuple[str, str]:
        named = {} if prefix is None else {"X-Rollout-Id": f"{prefix}-{call.run}"}
        headers = {"x-wait": wait, **named, **call.headers}
        return await proxy.called({"messages": call.messages}, call.answer, f"{session.label} {place}", headers)

    numbered = [*enumerate(session.calls)]
    starts = [place for place, call in numbered if not call.with_last]
    for start, end in zip(starts, [*starts[1:], len(numbered)], strict=True):
        wait = "0.3" if end - start > 1 else "0"  # longer than clocks may differ, on a busy machine, too
        found += await asyncio.gather(*(ask(*one, wait) for one in numbered[start:end]))
    places = {call_id: place for place, (_, call_id) in enumerate(found)}
    edges = [set[Edge]() for _ in found]
    rejected = set[int]()
    for rollout in dict.fromkeys(rollout for rollout, _ in found):
        for call in (await proxy.rollout(rollout, requests="short"))["calls"]:
            place = places[call["call_id"]]
            edges[place] = {(one["edge"], places.get(one["call_id"], -1)) for one in call["contexts"]}
            rejected |= {place} if call["rejected"] else set()
    return Replayed([rollout for rollout, _ in found], edges, rejected)
