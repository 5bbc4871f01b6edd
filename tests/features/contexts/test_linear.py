"""A rollout of 500 calls in 20 contexts with 4 sub-agents, and one of 50: a call takes as much work and memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.export.export import _transitions
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.json_text import dumps
from lightning_proxy.core.records import CallEnd, CallStart, Choice, ModelCall, RolloutName
from lightning_proxy.features.contexts.graph import graph_of
from lightning_proxy.proxy.api.views import rollout_detail
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.rows.prefix_tree import build_tree
from lightning_proxy.trainer.rows.samples import rollout_samples
from support.calls import call
from support.stores import store_url

Json = dict[str, Any]
MUCH = 1.35  # how much more a call of the long rollout may take: it has more forks among earlier calls
OF_CONTEXT = 25  # calls, the last of which sums up


class Agent:
    """Records what an agent does: contexts one after another, and in each fifth of them a sub-agent's in between."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name, self.calls = recorder, name, 0

    async def ask(self, messages: list[Json], order: str | None = None) -> Json:
        """Ask, and return the answer. Tokens are digests of words, so that equal beginnings have equal tokens."""
        n, self.calls = self.calls, self.calls + 1
        answer: Json = {"role": "assistant", "content": f"Answer {n} says that part {n} of the page is clear now."}
        if order is not None:
            function = {"name": "ask", "arguments": dumps({"order": order})}
            answer["tool_calls"] = [{"id": f"call_{n:024x}", "type": "function", "function": function}]
        prompt = tuple(self._id(word) for message in messages for word in self._words(message))
        sampled = tuple(self._id(word) for word in self._words(answer))
        call_id, choice = f"{self.name}-{n:05}", Choice(0, sampled, (-1.0,) * len(sampled), "stop")
        start = CallStart(
            call_id, RolloutName(self.name), "chat/completions", "policy", 0, {"messages": messages}, float(n)
        )
        await self.recorder.start(start)
        response = {"choices": [{"index": 0, "message": answer}]}
        await self.recorder.end(CallEnd(call_id, self.name, "ok", response, 200, prompt, (choice,), latency_ms=1.0))
        return answer

    @staticmethod
    def _words(message: Json) -> list[str]:
        return [message["role"], *str(message["content"]).split(), dumps(message.get("tool_calls")), "end"]

    @staticmethod
    def _id(word: str) -> int:
        return sum(ord(letter) * 31**i for i, letter in enumerate(word)) % 50_000

    async def work(self, contexts: int) -> None:
        since = "Read all pages and say what they have in common."
        for number in range(contexts):
            messages = [{"role": "system", "content": "You read pages."}, {"role": "user", "content": since}]
            helper = f"Read appendix {number} of the book, and say what is in it."
            own = OF_CONTEXT - (6 if number % 5 == 1 else 1)
            for turn in range(own):
                answer = await self.ask(messages, helper if number % 5 == 1 and turn == 3 else f"Open page {turn}.")
                found = f"Page {number}-{turn} of the book has words that no other page of it has."
                if number % 5 == 1 and turn == 3:
                    found = await self.helped(helper)
                called = answer["tool_calls"][0]["id"]
                messages = [*messages, answer, {"role": "tool", "tool_call_id": called, "content": found}]
            summary = await self.ask([*messages, {"role": "user", "content": "Sum up what you know so far."}])
            since = f"Known so far: {summary['content']}"

    async def helped(self, order: str) -> str:
        messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": order}]
        for turn in range(4):
            answer = await self.ask(messages, f"Open appendix {turn}.")
            called = answer["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": called, "content": f"Line {turn} of the appendix of {order}"}
            messages = [*messages, answer, result]
        return str((await self.ask(messages))["content"])


def calls_made(work: Callable[[], object]) -> int:
    """How many functions of Python and of C the work calls."""
    count = 0

    def tell(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tell)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def answer_of(place: int, *, is_final: bool) -> Json:
    answer = {"role": "assistant", "content": f"Note {place} says that part {place * 7} of the page is clear."}
    function = {"name": "open", "arguments": dumps({"path": f"the/page/with/number/{place}"})}
    called = {"id": f"call_{place:024x}", "type": "function", "function": function}
    return answer if is_final else {**answer, "tool_calls": [called]}


def with_notes(place: int, *, is_final: bool) -> list[Json]:
    """A prompt of a new context with all earlier answers in its text."""
    notes = [answer_of(there, is_final=is_final)["content"] for there in range(place)]
    return [{"role": "user", "content": "\n".join(["Notes:", *notes, f"Now do step {place} of the whole work."])}]


def cleared(place: int, *, is_final: bool) -> list[Json]:
    """A history in which all results but the last are cleared."""
    messages: list[Json] = [{"role": "user", "content": "Read all pages of the book."}]
    for there in range(place):
        answer = answer_of(there, is_final=is_final)
        found = "cleared" if there < place - 1 else f"Page {there} has words that no other page has."
        asked = {"role": "user"} if is_final else {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"]}
        messages += [answer, {**asked, "content": found}]
    return messages


def alone(place: int, *, is_final: bool) -> list[Json]:
    """A prompt that has nothing of the earlier ones."""
    return [{"role": "user", "content": f"Room {place} has a table and {place} doors. Where do you go?"}]


@pytest.mark.parametrize("is_final", [True, False])
@pytest.mark.parametrize("asked", [with_notes, cleared, alone])
def test_the_work_of_the_graph_grows_as_the_requests_do(asked: Callable[..., list[Json]], is_final: bool) -> None:
    work = {}
    for length in (20, 200):
        calls, lines = list[ModelCall](), 0
        for place in range(length):
            messages = asked(place, is_final=is_final)
            lines += sum(len(message["content"].splitlines()) for message in messages)
            response = {"choices": [{"message": answer_of(place, is_final=is_final)}]}
            made = call(f"c{place}", request={"messages": messages}, response=response)
            calls.append(replace(made, started_at=float(place), latency_ms=1.0))
        work[length] = calls_made(partial(graph_of, calls)) / lines
    assert work[200] < MUCH * work[20]


async def per_call(directory: Path, contexts: int) -> dict[str, float]:
    directory.mkdir()
    async with opened(StoreConfig(url=store_url(directory))) as database:
        store = Store(database)
        async with Recorder(store, merged=False) as recorder:
            agent = Agent(recorder, "r")
            await agent.work(contexts)
        stored = await database.one(
            "SELECT SUM(LENGTH(COALESCE(calls.request, '')) + LENGTH(prompt_ids)) AS bytes FROM calls"
        )
        large = await database.one("SELECT COALESCE(SUM(LENGTH(request)), 0) AS bytes FROM large_requests")
        assert stored is not None and large is not None
        rollout, short = await store.rollouts.get("r"), await store.calls.of("r", short=True)
        whole = await store.calls.of("r")
    helpers = len(range(1, contexts, 5))
    edges = [[one.edges for one in graph.calls] for calls in (short, whole) if (graph := graph_of(calls))]
    assert edges[0] == edges[1]
    assert Counter(edge.kind for found in edges[0] for edge in found) == {
        "continues": agent.calls - contexts - helpers, "compacts": contexts - 1,
        "delegates": helpers, "returns": helpers,
    }  # fmt: skip
    samples = rollout_samples(whole, [0.5] * len(whole), task_id="t", max_tokens=10**6).samples
    assert len(samples) == contexts + helpers
    detail = rollout_detail(rollout, short, [])
    assert next(_transitions(rollout, whole, [], [], {}))["contexts"] == []
    exported = [dumps(row) for row in _transitions(rollout, whole, [], [], {})]
    work = {
        "stored bytes": stored["bytes"] + large["bytes"],
        "bytes of the answer": len(dumps(detail)),
        "work of the graph": calls_made(lambda: graph_of(short)),
        "work of the graph, of whole requests": calls_made(lambda: graph_of(whole)),
        "work of rows": calls_made(lambda: rollout_samples(whole, [0.5] * len(whole), task_id="t", max_tokens=10**6)),
        "tokens of the tree": len(build_tree([sample.token_ids for sample in samples])),
        "bytes exported": sum(map(len, exported)),
    }
    return {name: number / len(short) for name, number in work.items()}


async def test_a_call_of_a_long_rollout_takes_as_much_as_one_of_a_short_one(tmp_path: Path) -> None:
    short, long = await per_call(tmp_path / "short", 2), await per_call(tmp_path / "long", 20)
    assert {name: long[name] / short[name] for name in long} == {
        name: pytest.approx(1, abs=MUCH - 1) for name in short
    }, (short, long)
