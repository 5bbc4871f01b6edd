"""A call of a rollout of 200 calls takes as much work as one of 20: for the graph of contexts, and for rows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lightning_proxy.core.json_text import dumps
from lightning_proxy.core.records import Choice, ModelCall
from lightning_proxy.features.contexts.graph import graph_of
from lightning_proxy.trainer.rows.samples import rollout_samples
from support.calls import call

Json = dict[str, Any]
MUCH = 1.35  # how much more a call of the long rollout may take: it has more forks among earlier calls
OF_CONTEXT = 10  # calls, the last of which sums up


def in_contexts(answers: list[Json]) -> list[Json]:
    """The history since the last summary."""
    begun = len(answers) // OF_CONTEXT * OF_CONTEXT
    since = answers[begun - 1]["content"] if begun else "Read all pages and say what they have in common."
    return [{"role": "user", "content": f"Known so far: {since}"}, *turns(answers[begun:], "has words of its own")]


def cleared(answers: list[Json]) -> list[Json]:
    """A history in which all results but the last are cleared."""
    begin = [{"role": "user", "content": "Read all pages of the book."}]
    return [*begin, *turns(answers[:-1], "is cleared"), *turns(answers[-1:], "has words that no other page has")]


def turns(answers: list[Json], said: str) -> list[Json]:
    """Each answer with its tool's result, or with what the user says of it."""
    messages = list[Json]()
    for answer in answers:
        asked = [{"role": "tool", "tool_call_id": made["id"]} for made in answer.get("tool_calls", ())]
        messages += [
            answer,
            {**(asked or [{"role": "user"}])[0], "content": f"Page of {answer['content'][:8]} {said}."},
        ]
    return messages


def with_notes(answers: list[Json]) -> list[Json]:
    """A prompt of a new context with all earlier answers in its text."""
    notes = [answer["content"] for answer in answers]
    return [{"role": "user", "content": "\n".join(["Notes:", *notes, f"Now do step {len(answers)} of the work."])}]


def alone(answers: list[Json]) -> list[Json]:
    """A prompt that has nothing of the earlier ones."""
    return [{"role": "user", "content": f"Room {len(answers)} has {len(answers)} doors. Where do you go?"}]


def tokens_of(messages: list[Json]) -> tuple[int, ...]:
    """Digests of words, so that equal beginnings have equal tokens."""
    words = [word for message in messages for word in (message["role"], *message["content"].split(), "end")]
    return tuple(sum(ord(letter) * 31**i for i, letter in enumerate(word)) % 50_000 for word in words)


def calls_made(work: Callable[[], object]) -> int:
    """How many functions of Python and of C the work calls."""
    events, before = Counter[str](), sys.getprofile()

    def tell(frame: Any, event: str, argument: Any) -> None:
        events[event] += 1

    sys.setprofile(tell)
    try:
        work()
    finally:
        sys.setprofile(before)
    return events["call"] + events["c_call"]


@pytest.mark.parametrize("is_final", [True, False])
@pytest.mark.parametrize("asked", [in_contexts, cleared, with_notes, alone])
def test_a_call_of_a_long_rollout_takes_as_much_as_one_of_a_short_one(
    asked: Callable[[list[Json]], list[Json]], is_final: bool
) -> None:
    """By the lines of the requests, which `with_notes` and `cleared` make longer and longer."""
    of_graph, of_rows = list[float](), list[float]()
    for length in (20, 200):
        calls, answers, lines = list[ModelCall](), list[Json](), 0
        for place in range(length):
            messages = asked(answers)
            answer: Json = {"role": "assistant", "content": f"{place:08} is the part of the page that is clear."}
            if not is_final:
                function = {"name": "open", "arguments": dumps({"path": f"the/page/with/number/{place}"})}
                answer["tool_calls"] = [{"id": f"call_{place:024x}", "type": "function", "function": function}]
            answers.append(answer)
            lines += sum(len(message["content"].splitlines()) for message in messages)
            sampled = tokens_of([answer])
            made = call(
                f"c{place}", prompt=tokens_of(messages), choices=(Choice(0, sampled, (-1.0,) * len(sampled)),),
                request={"messages": messages}, response={"choices": [{"message": answer}]},
                extends=f"c{place - 1}" if asked is in_contexts and place % OF_CONTEXT else None,
            )  # fmt: skip
            calls.append(replace(made, started_at=float(place), latency_ms=1.0))
        of_graph.append(calls_made(partial(graph_of, calls)) / lines)
        rows = partial(rollout_samples, calls, [0.5] * length, task_id="t", max_tokens=10**6)
        of_rows.append(calls_made(rows) / length)
    assert of_graph[1] < MUCH * of_graph[0]
    assert of_rows[1] < MUCH * of_rows[0] or asked is not in_contexts, "else each call has a row of its own"
