"""Which calls are rejected for another attempt, and what a step learns from a rollout of several contexts: by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_proxy.core.records import ModelCall
from lightning_proxy.features.contexts.config import ContextsConfig
from lightning_proxy.features.contexts.graph import graph_of
from lightning_proxy.features.contexts.trainer import sifted
from lightning_proxy.trainer.credit.strategies import Credited, group_credit
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
        # Four steps. The last one has no sibling, and keeps the baseline of the third: 1 - 0.25.
        (
            TRIED_TWICE, 1.0, DISCOUNTED | {"rejected": "as_others"},
            [Credited(0.125, 0.0625), Credited(0.25, 0.125), Credited(0.5, 0.25), Credited(1.0, 0.75)],
        ),
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
