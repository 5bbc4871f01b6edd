"""Which calls are attempts at the same request, so that one may be rejected for another: by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_proxy.core.records import ModelCall
from lightning_proxy.features.contexts.graph import Graph, graph_of
from support.calls import call

Json = dict[str, Any]
SYSTEM, TASK = {"role": "system", "content": "You are it."}, {"role": "user", "content": "Find why the build fails."}
FIRST, SECOND, THIRD = (
    "The header of the parser was moved in the last commit of the tree.",
    "The compiler is too old for the flags that the file sets now.",
    "The linker does not find the library of the parser at all.",
)
AFTER = [SYSTEM, TASK, {"role": "assistant", "content": SECOND}, {"role": "user", "content": "Go on."}]


def asked(
    place: int, request: Json | list[Json], answer: str | Json, agent: str | None = None, **more: Any
) -> ModelCall:
    request = request if isinstance(request, dict) else {"messages": request}
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    response = {"choices": [{"text": answer} if "prompt" in request else {"message": message}]}
    made = call(f"c{place}", agent, request=request, response=response)
    return replace(made, seq=place, started_at=float(place), latency_ms=1.0, **more)


def graph(*calls: ModelCall) -> Graph:
    found = graph_of(calls)
    assert found is not None
    return found


def test_an_answer_of_another_form_is_no_attempt() -> None:
    """A program may read one call's JSON, and go on with another's words."""
    tools = [{"type": "function", "function": {"name": "open"}}]
    for form, other in (({"response_format": {"type": "json_object"}}, {}), ({"tools": tools}, {"tools": tools[:0]})):
        found = graph(
            asked(0, {"messages": [SYSTEM, TASK], **form}, FIRST),
            asked(1, {"messages": [SYSTEM, TASK], **other}, SECOND),
            asked(2, AFTER, THIRD),
        )
        assert found.calls[1].edges == [] and found.rejected() == {}, form


def test_prompts_of_tokens_are_not_all_the_same() -> None:
    calls = [
        asked(0, {"prompt": [1, 2]}, FIRST),
        asked(1, {"prompt": [7, 8]}, SECOND),
        asked(2, {"prompt": [1, 2, 3]}, THIRD, extends="c0"),
        asked(3, {"prompt": [1, 2, 3, 4]}, FIRST, extends="c2"),
    ]
    found = graph(*calls)
    assert [one.edges for one in found.calls] == [[], [], [("continues", 0)], [("continues", 2)]]
    assert found.rejected() == {}
    again = graph(replace(calls[0], superseded_by="c1"), replace(calls[1], request={"prompt": [1, 2]}))
    assert again.calls[1].edges == [("retries", 0)]


def test_what_a_conversation_of_the_providers_had_before_is_not_known() -> None:
    more = {"input": "Go on.", "conversation": "conv_1"}
    assert graph(asked(0, more, FIRST), asked(1, more, SECOND)).calls[1].edges == []


def test_samples_that_one_prompt_has_are_all_used() -> None:
    samples = [asked(place, [SYSTEM, TASK], text) for place, text in enumerate((FIRST, SECOND, THIRD))]
    given = {"role": "system", "content": f"You make one of three: {FIRST}\n{SECOND}\n{THIRD}"}
    assert graph(*samples, asked(3, [given, TASK], "All of them may be right.")).rejected() == {}
