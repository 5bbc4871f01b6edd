"""What a step learns from a rollout of several contexts: by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_proxy.proxy.contexts.config import ContextKeys
from lightning_proxy.proxy.types import Choice, ModelCall
from lightning_proxy.trainer.contexts.sift import sifted
from lightning_proxy.trainer.credit.strategies import Credited, group_credit
from lightning_proxy.trainer.rows.prefix_tree import build_tree
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.step.losses import token_weights
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call

TASK = [{"role": "system", "content": "You are a coder."}, {"role": "user", "content": "Find why the build fails."}]
LOST, USED, SUMMARY, LAST = (
    {"role": "assistant", "content": text}
    for text in (
        "The compiler is too old for the flags that the build file sets, I think.",
        "Let me read the log of the last build before I say anything about it.",
        "So far: the log of the last build says that a header of the parser is missing.",
        "The header of the parser was moved in the last commit: include it from its new place.",
    )
)
SUMMARISE, SINCE = {"role": "user", "content": "Sum up."}, {"role": "user", "content": str(SUMMARY["content"])}


def asked(place: int, messages: list[Any], answer: Any) -> ModelCall:
    made = call(f"c{place}", request={"messages": messages}, response={"choices": [{"message": answer}]})
    return replace(made, seq=place, started_at=float(place), latency_ms=1.0)


CALLS = [
    asked(0, TASK, LOST),
    asked(1, TASK, USED),
    asked(2, [*TASK, USED, SUMMARISE], SUMMARY),
    asked(3, [*TASK, SINCE], LAST),
]
HALF, DOWN = Credited(1.0, 0.5), Credited(1.0, -0.5)


@pytest.mark.parametrize(
    ("settings", "credit"),
    [
        ({}, [None, HALF, HALF, HALF]),
        ({"rejected": "negative"}, [DOWN, HALF, HALF, HALF]),
        ({"rejected": "as_others"}, [HALF, HALF, HALF, HALF]),
        ({"summaries": "leave_out"}, [None, HALF, None, HALF]),
    ],
)
def test_a_rejected_attempt_and_a_summary_get_the_credit_of_the_settings(settings: Any, credit: Any) -> None:
    found, counts = sifted(ContextKeys(**settings), CALLS, [HALF] * 4)
    assert found == credit
    assert counts == {"calls_rejected": 1, "calls_summaries": 1}


def test_a_rejected_attempt_is_never_pulled_up() -> None:
    found, _ = sifted(ContextKeys(rejected="negative"), CALLS, [DOWN] * 4)
    assert found[0] == DOWN


def test_calls_of_agents_that_are_not_trained_stay_left_out() -> None:
    found, _ = sifted(ContextKeys(rejected="negative"), CALLS, [None] * 4)
    assert found == [None] * 4


def tokens(place: int, prompt: tuple[int, ...], answer: tuple[int, ...], agent: str | None = None) -> ModelCall:
    choice = Choice(0, answer, (-1.0,) * len(answer), "stop")
    return call(f"t{place}", agent, prompt, seq=place, choices=(choice,))


MAIN, HELPER = tuple(range(100)), tuple(range(500, 600))
# The main context and a sub-agent's, two calls each; each answer is two tokens.
CONTEXTS = [
    tokens(0, MAIN, (1, 2), "lead"),
    tokens(1, HELPER, (3, 4), "helper"),
    tokens(2, (*HELPER, 3, 4, 9), (5, 6), "helper"),
    tokens(3, (*MAIN, 1, 2, 8), (7, 7), "lead"),
]


def test_tokens_that_contexts_share_are_computed_once_whatever_interleaves() -> None:
    for seed in range(5):
        mixed = random.Random(seed).sample(range(2), 2)
        order = [CONTEXTS[i] for i in ((0, 3, 1, 2) if mixed == [0, 1] else (1, 0, 2, 3))]
        made = rollout_samples(order, [0.5] * 4, task_id="t", max_tokens=1000)
        assert len(made.samples) == 2 and made.counts["calls_merged"] == 2
        assert len(build_tree([sample.token_ids for sample in made.samples])) == 2 * (100 + 2 + 1 + 2)
    compacted = tokens(4, (*MAIN, 42), (7, 8))  # begins with the main context's prompt
    rows = rollout_samples([*CONTEXTS, compacted], [0.5] * 5, task_id="t", max_tokens=1000).samples
    assert len(build_tree([sample.token_ids for sample in rows])) == 210 + 3


@pytest.mark.parametrize("weighting", ["auto", "rollout"])
def test_a_rollout_weighs_the_same_however_many_contexts_it_has(weighting: str) -> None:
    one = [tokens(0, MAIN, (1, 2)), tokens(1, (*MAIN, 1, 2, 8), (7, 7))]
    four = [tokens(i, tuple(range(1000 * i, 1000 * i + 50)), (1, 2)) for i in range(4)]
    rows = [
        sample
        for name, calls in (("one", one), ("four", four))
        for sample in rollout_samples(
            [replace(one, rollout_id=name) for one in calls], [0.5] * len(calls), task_id="t", max_tokens=1000
        ).samples
    ]
    weights = token_weights(rows, ContextKeys(weighting=weighting))
    total = {
        name: sum(weights[name] * row.trained_tokens for row in rows if row.rollout_id == name) for name in weights
    }
    assert len(rows) == 5 and total == {"one": pytest.approx(0.5), "four": pytest.approx(0.5)}


def test_a_sub_agents_calls_get_their_parents_return_or_what_agent_credit_says() -> None:
    rewards = [RolloutRewards(1.0, {"t2": 3.0}), RolloutRewards(0.0)]
    group = [Sibling(CONTEXTS, one) for one in rewards]
    team = group_credit(group, ContextKeys(baseline="dr_grpo"))[0]
    assert team == [Credited(1.0, 0.5)] * 4
    settings = {"agents": ["lead", "helper"], "agent_credit": "own", "credit": "discounted"}
    own = group_credit(group, ContextKeys(baseline="dr_grpo", **settings))[0]
    assert [one and one.returned for one in own] == [1.0, 4.0, 4.0, 1.0]  # only the helper has the reward of its call
