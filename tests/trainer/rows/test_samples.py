"""From calls to training rows."""

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_proxy.core.records import Choice, ModelCall
from lightning_proxy.trainer.collect.sampled import Sampled
from lightning_proxy.trainer.rows.samples import Placement, RolloutSamples, rollout_samples
from lightning_proxy.trainer.types import Sampling
from support.calls import call as call_with


def call(prompt: list[int], answer: list[int], *, name: str = "c", trainable: bool = True, **request: Any) -> ModelCall:
    choice = Choice(0, tuple(answer), tuple(-0.1 * t for t in answer))
    return call_with(name, prompt=tuple(prompt), choices=(choice,), trainable=trainable, request=request)


def rows(*calls: ModelCall, max_tokens: int = 100) -> RolloutSamples:
    advantages = [float(i + 1) for i in range(len(calls))]
    return rollout_samples(calls, advantages, task_id="t", max_tokens=max_tokens, sampled=Sampled().of)


def test_a_row_says_how_its_answers_were_sampled_where_that_is_more_than_a_temperature() -> None:
    first, second = call([1], [2], temperature=0.7), call([1, 2, 7], [9, 8], temperature=0.7, top_p=0.9, top_k=5)
    (sample,) = rows(first, second).samples
    assert sample.shaped == ((3, 5, Sampling(0.7, top_p=0.9, top_k=5)),)
    assert sample.temperatures == (1.0, 0.7, 1.0, 0.7, 0.7)
    (cold,) = rows(call([1], [2], temperature=0.001)).samples
    assert cold.temperatures == (1.0, 0.01), "vLLM samples at no lower one"


TOOL: dict[str, Any] = {"tools": [{"name": "f"}]}
STRICT = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
NOT_TOLD: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["a"]}},
    {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, STRICT,
    {"tools": [{"type": "function", "name": "f", "strict": True}], "tool_choice": "auto"},
    TOOL | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, TOOL | {"tool_choice": "required"},
    TOOL | {"parallel_tool_calls": False}, {"logit_bias": {"x": 1}}, {"top_p": "high"}, {"repetition_penalty": -1.0},
    {"logit_bias": {"-7": 1.0}}, {"allowed_token_ids": []}, {"bad_words": ["no"]},
]  # fmt: skip
PLAIN: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}}, {"text": {"format": {"type": "text"}}}, TOOL,
    TOOL | {"output_config": {"effort": "low"}, "tool_choice": {"type": "auto"}}, STRICT | {"tool_choice": "none"},
    {"top_p": None, "logit_bias": None, "top_k": -1},
]  # fmt: skip


@pytest.mark.parametrize("request_", NOT_TOLD)
def test_what_a_request_alone_does_not_tell_is_left_out(request_: dict[str, Any]) -> None:
    made = rows(call([1], [2], **request_))
    assert made.samples == () and made.counts["calls_not_followed"] == 1


@pytest.mark.parametrize("request_", PLAIN)
def test_requests_without_constraints_are_plain(request_: dict[str, Any]) -> None:
    (sample,) = rows(call([1], [2], **request_)).samples
    assert sample.shaped == ()


@pytest.mark.parametrize("unusable", [call([], [1]), call([1], []), call([1], [2], temperature=0)])
def test_calls_without_a_prompt_an_answer_or_a_distribution_are_left_out(unusable: ModelCall) -> None:
    assert rows(unusable) == RolloutSamples((), Counter(calls_untrainable=1), (Placement(None, "untrainable"),))


@pytest.mark.parametrize(
    ("calls", "counted"),
    [
        ([([1], [2, 3]), ([1, 2, 8, 7], [4])], {"forks_drift"}),  # "23" came back as "28"
        ([([1], [2, 3]), ([1, 2], [4])], {"forks_repeated"}),
        ([([1], [2, 3]), ([1, 2, 3], [4])], {"forks_adjoining"}),
        ([([1], [2, 3]), ([1, 8, 7], [4])], {"forks_edited"}),  # nothing is left of the answer
        ([([1], [2]), ([1, 2, 7], [4]), ([1, 2, 9], [4])], {"calls_merged", "forks_edited"}),
        ([([1, 5], [2]), ([1, 6], [4])], {"forks_new"}),  # a system prompt in common
    ],
)
def test_why_a_call_opens_a_row_is_counted(calls: Any, counted: set[str]) -> None:
    made = rows(*(call(*each) for each in calls))
    assert dict(made.counts) == {"calls": len(calls), **dict.fromkeys(counted, 1)}
    first, *others = made.placements
    assert (first, {f"{'calls' if p == 'merged' else 'forks'}_{p}" for _, p in others}) == ((0, "first"), counted)
    assert [len(sample.call_ids) for sample in made.samples] == [*Counter(row for row, _ in made.placements).values()]


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_is_trained_once_after_exactly_what_the_model_saw(seed: int) -> None:
    """Random agents that go on, re-tokenise, edit, go back, ask again and start anew."""
    rng = random.Random(seed)

    def some(most: int = 4) -> list[int]:
        return [rng.randrange(3) for _ in range(rng.randrange(1, most + 1))]

    calls = [call([0, *some()], some(), name="0")]
    for i in range(1, 25):
        past = [*rng.choice(calls).prompt_token_ids, *rng.choice(calls).response_token_ids]
        before = calls[-1]
        told = [*before.prompt_token_ids, *before.response_token_ids]
        prompt = rng.choice(
            [told + some(), told[:-1] + some(), past, past[: rng.randrange(1, len(past))], [1, *some()]]
        )
        calls.append(call(prompt, some(), name=str(i)))
    made = rows(*calls, max_tokens=10_000)
    for sample in made.samples:
        trained = [0.0] * len(sample.mask)
        for number in map(int, sample.call_ids):
            whole = calls[number].prompt_token_ids + calls[number].response_token_ids
            assert sample.token_ids[: len(whole)] == whole
            for place in range(len(calls[number].prompt_token_ids), len(whole)):
                trained[place] += number + 1.0
        assert sample.advantages == tuple(trained) and sample.mask == tuple(map(bool, trained))
    assert sorted(int(name) for sample in made.samples for name in sample.call_ids) == [*range(25)]


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, -9999.0])
def test_only_the_call_whose_captured_logprobs_are_not_finite_is_left_out(logprob: float) -> None:
    bad = replace(call([1], [2, 3], name="bad"), choices=(Choice(0, (2, 3), (-0.1, logprob)),))
    made = rows(call([1], [2], name="a"), bad, call([1, 2, 7], [9], name="b"))
    assert [sample.call_ids for sample in made.samples] == [("a", "b")]
    assert made.counts["calls_not_finite"] == 1


def test_an_untrainable_call_is_only_context() -> None:
    made = rows(call([1], [2], trainable=False), call([1, 2, 3], [4]))
    assert [s.mask for s in made.samples] == [(0, 0, 0, 1)]
    assert made.counts["calls_untrainable"] == 1
