"""Which calls are rejected for another attempt, what a step learns then, and how the work grows with a rollout."""

from __future__ import annotations

from collections.abc import Callable
from cProfile import Profile
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import pytest

from lightning_proxy.core.json_text import dumps
from lightning_proxy.core.records import Choice, ModelCall
from lightning_proxy.features.contexts.config import ContextsConfig
from lightning_proxy.features.contexts.graph import graph_of
from lightning_proxy.features.contexts.trainer import sifted
from lightning_proxy.trainer.credit.strategies import Credited, group_credit
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.sections import TrainerConfig

Json = dict[str, Any]
SYSTEM, TASK = {"role": "system", "content": "You are it."}, {"role": "user", "content": "Find why the build fails."}
LOST, USED, SUMMARY, LAST = ANSWERS = [
    {"role": "assistant", "content": text}
    for text in (
        "The compiler is too old for the flags that the build file sets, I think.",
        "Let me read the log of the last build before I say anything about it.",
        "So far: the log of the last build says that a header of the parser is missing.",
        "The header of the parser was moved in the last commit: include it from its new place.",
    )
]
BEGUN = [SYSTEM, TASK]
SUMMARISE, SINCE = {"role": "user", "content": "Sum up."}, {"role": "user", "content": SUMMARY["content"]}
GO_ON = {"role": "user", "content": "Go on, then."}


def asked(place: int, request: Json | list[Json], answer: Json, **more: Any) -> ModelCall:
    request = request if isinstance(request, dict) else {"messages": request}
    choice = {"text": answer["content"]} if "prompt" in request else {"message": answer}
    made = call(f"c{place}", request=request, response={"choices": [choice]})
    return replace(made, seq=place, started_at=float(place), latency_ms=1.0, **more)


# Which attempts are at the same request ------------------------------------------------------------------------------


JSON_FORM = {"response_format": {"type": "json_object"}}
OPEN = {"tools": [{"type": "function", "function": {"name": "open"}}]}
WENT_ON = [*BEGUN, USED, GO_ON]
OF_PROVIDER = {"input": "Go on.", "conversation": "conv_1"}
CHOICE = {"role": "system", "content": f"One of three: {LOST['content']}\n{USED['content']}\n{SUMMARY['content']}"}


@pytest.mark.parametrize(
    "requests",
    [
        # A program may read one call's JSON, and go on with another's words.
        [{"messages": BEGUN, **JSON_FORM}, BEGUN, WENT_ON],
        [{"messages": BEGUN, **OPEN}, {"messages": BEGUN, "tools": []}, WENT_ON],
        [{"prompt": [1, 2]}, {"prompt": [7, 8]}],
        # What a conversation of the provider's had before is not known.
        [OF_PROVIDER, OF_PROVIDER],
        # Samples that one prompt has are all used.
        [BEGUN, BEGUN, BEGUN, [CHOICE, TASK]],
    ],
    ids=["form", "tools", "tokens", "conversation", "samples"],
)
def test_what_is_no_attempt_at_the_same_request_is_rejected_for_none(requests: list[Any]) -> None:
    found = graph_of([asked(n, one, said) for n, (one, said) in enumerate(zip(requests, ANSWERS, strict=False))])
    assert found is not None and found.rejected() == {}
    assert requests[0] is BEGUN or found.calls[1].edges == []


def test_prompts_of_tokens_continue_each_other_and_are_sent_again() -> None:
    calls = [asked(0, {"prompt": [1, 2]}, LOST), asked(1, {"prompt": [1, 2, 3]}, USED, extends="c0")]
    again = [replace(calls[0], superseded_by="c1"), asked(1, {"prompt": [1, 2]}, USED)]
    found = [graph.calls[1].edges for made in (calls, again) if (graph := graph_of(made))]
    assert found == [[("continues", 0)], [("retries", 0)]]


# What is learned -----------------------------------------------------------------------------------------------------

CALLS = [
    asked(0, BEGUN, LOST), asked(1, BEGUN, USED), asked(2, [*BEGUN, USED, SUMMARISE], SUMMARY),
    asked(3, [*BEGUN, SINCE], LAST),
]  # fmt: skip
# The second answer is rejected for the third.
TRIED_TWICE = [
    asked(0, BEGUN, USED), asked(1, [*BEGUN, USED, GO_ON], LOST), asked(2, [*BEGUN, USED, GO_ON], SUMMARY),
    asked(3, [*BEGUN, USED, GO_ON, SUMMARY, GO_ON], LAST),
]  # fmt: skip
HALF, DOWN = Credited(1.0, 0.5), Credited(1.0, -0.5)
DISCOUNTED = {"credit": "discounted", "discount": 0.5}


@pytest.mark.parametrize(
    ("calls", "reward", "settings", "credit"),
    [
        (CALLS, 1.0, {}, [None, HALF, HALF, HALF]),
        (CALLS, 1.0, {"rejected": "negative"}, [DOWN, HALF, HALF, HALF]),
        (CALLS, 1.0, {"rejected": "as_others"}, [HALF, HALF, HALF, HALF]),
        (CALLS, 1.0, {"summaries": "leave_out"}, [None, HALF, None, HALF]),
        # A rejected attempt is never pulled up.
        (CALLS, -1.0, {"rejected": "negative"}, [Credited(-1.0, -0.5)] * 4),
        (CALLS, 1.0, {"rejected": "negative", "agents": ["another"]}, [None] * 4),
        # Three steps: 0.5 · 0.5 · 1, 0.5 · 1 and 1, next to the sibling's zeros.
        (TRIED_TWICE, 1.0, DISCOUNTED, [Credited(0.25, 0.125), None, Credited(0.5, 0.25), HALF]),
    ],
)  # fmt: skip
def test_rejected_attempts_and_summaries_get_the_credit_of_the_settings(
    calls: list[ModelCall], reward: float, settings: Json, credit: Any
) -> None:
    """Next to a sibling with three calls, none of them rejected, and no reward."""
    config = TrainerConfig.model_validate({"baseline": "dr_grpo", **settings})
    other = [call(f"s{place}", seq=place) for place in range(3)]
    found = [sifted(config.section(ContextsConfig), of) for of in (calls, other)]
    group = [Sibling(one.calls, RolloutRewards(at), one) for one, at in zip(found, (reward, 0.0), strict=True)]
    assert group_credit(group, config)[0] == credit
    assert found[0].counts["calls_rejected"] == 1 and found[0].counts.get("calls_summaries", 0) == (calls is CALLS)


# A call of a long rollout --------------------------------------------------------------------------------------------

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
        of_tool = [{"role": "tool", "tool_call_id": made["id"]} for made in answer.get("tool_calls", ())]
        (reply,) = of_tool or [{"role": "user"}]
        messages += [answer, reply | {"content": f"Page of {answer['content'][:8]} {said}."}]
    return messages


def with_notes(answers: list[Json]) -> list[Json]:
    """A prompt of a new context with all earlier answers in its text."""
    notes = [answer["content"] for answer in answers]
    return [{"role": "user", "content": "\n".join(["Notes:", *notes, f"Now do step {len(answers)} of the work."])}]


def tokens_of(messages: list[Json]) -> tuple[int, ...]:
    """Digests of words, so that equal beginnings have equal tokens."""
    words = [word for message in messages for word in (message["role"], *message["content"].split(), "end")]
    return tuple(crc32(word.encode()) % 50_000 for word in words)


def calls_made(work: Callable[[], object]) -> int:
    """How many functions of Python and of C the work calls."""
    profile = Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("is_final", [True, False])
@pytest.mark.parametrize("asked", [in_contexts, cleared, with_notes])
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
