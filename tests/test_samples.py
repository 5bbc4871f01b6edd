"""From calls to training rows."""

from typing import Any

import pytest

from lightning_proxy.proxy.types import Choice, ModelCall
from lightning_proxy.trainer.samples import RolloutSamples, rollout_samples, rollout_weights
from lightning_proxy.trainer.types import Sample


def call(
    prompt: list[int], answer: list[int], *, name: str = "c", trainable: bool = True, choices: int = 1, **request: Any
) -> ModelCall:
    choice = Choice(0, tuple(answer), tuple(-0.1 * t for t in answer))
    return ModelCall(
        name, "r", 0, None, "chat.completions", "ok", "policy", 0, (0,), request, {}, tuple(prompt),
        (choice,) * choices, None, (), None, trainable, None, None, 200, 0.0, None, None,
    )  # fmt: skip


def rows(*calls: ModelCall, max_tokens: int = 100) -> RolloutSamples:
    return rollout_samples(calls, [float(i + 1) for i in range(len(calls))], task_id="t", max_tokens=max_tokens)


def test_a_row_that_would_become_too_long_ends_before_it() -> None:
    made = rows(call([1], [2], name="a"), call([1, 2, 7, 8], [9], name="b"), max_tokens=4)
    assert [sample.token_ids for sample in made.samples] == [(1, 2)]
    assert made.long_rows == 1


def test_a_single_call_is_one_row() -> None:
    (sample,) = rows(call([1, 2], [3, 4], temperature=0.5)).samples
    assert sample.token_ids == (1, 2, 3, 4)
    assert sample.mask == (0, 0, 1, 1)
    assert sample.logprobs == pytest.approx((0, 0, -0.3, -0.4))
    assert sample.advantages == (0.0, 0.0, 1.0, 1.0)
    assert sample.temperatures == (1.0, 1.0, 0.5, 0.5)
    assert (sample.rollout_id, sample.task_id, sample.call_ids) == ("r", "t", ("c",))


def test_a_call_that_continues_the_tokens_joins_the_row_with_its_own_advantage() -> None:
    (sample,) = rows(call([1], [2], name="a"), call([1, 2, 7, 8], [9], name="b")).samples
    assert sample.token_ids == (1, 2, 7, 8, 9)
    assert sample.mask == (0, 1, 0, 0, 1)
    assert sample.advantages == (0.0, 1.0, 0.0, 0.0, 2.0)
    assert sample.call_ids == ("a", "b")


def test_a_call_that_differs_in_one_token_opens_a_new_row() -> None:
    first, second = rows(call([1], [2, 3]), call([1, 2, 4, 5], [6])).samples
    assert first.token_ids == (1, 2, 3)
    assert second.mask == (0, 0, 0, 0, 1)


def test_any_open_row_may_be_continued_not_only_the_last() -> None:
    first, second = rows(call([1], [2]), call([5], [6]), call([1, 2, 3], [4])).samples
    assert first.token_ids == (1, 2, 3, 4)
    assert second.token_ids == (5, 6)


def test_the_longest_row_that_fits_is_continued() -> None:
    first, second = rows(call([1], [2]), call([1], [2, 3]), call([1, 2, 3], [4])).samples
    assert first.token_ids == (1, 2)
    assert second.token_ids == (1, 2, 3, 4)


def test_a_branch_keeps_the_shared_part_as_context() -> None:
    first, second = rows(call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])).samples
    assert first.mask == (0, 1, 0, 1)
    assert second.mask == (0, 0, 0, 1)


def test_an_untrainable_call_is_only_context() -> None:
    made = rows(call([1], [2], trainable=False), call([1, 2, 3], [4]))
    assert [s.mask for s in made.samples] == [(0, 0, 0, 1)]
    assert made.untrainable_calls == 1


@pytest.mark.parametrize("unusable", [call([], [1]), call([1], []), call([1], [2], temperature=0)])
def test_calls_without_a_prompt_an_answer_or_a_distribution_are_left_out(unusable: ModelCall) -> None:
    assert rows(unusable) == RolloutSamples(samples=(), untrainable_calls=1)


def test_calls_with_several_answers_are_left_out_and_counted() -> None:
    assert rows(call([1], [2], choices=2)) == RolloutSamples(samples=(), ambiguous_calls=1)


def test_rows_over_the_limit_are_dropped_and_counted() -> None:
    made = rows(call([1, 2], [3]), call([9], [8]), max_tokens=2)
    assert [s.token_ids for s in made.samples] == [(9, 8)]
    assert made.long_rows == 1


def test_no_calls_give_no_rows() -> None:
    assert rows() == RolloutSamples(samples=())


def test_every_rollout_weighs_the_same_whatever_its_rows_and_tokens() -> None:
    def sample(rollout_id: str, mask: tuple[int, ...]) -> Sample:
        zeros = (0.0,) * len(mask)
        return Sample(rollout_id, "t", tuple(range(len(mask))), mask, zeros, zeros, zeros)

    samples = [sample("a", (0, 1, 1)), sample("a", (0, 1, 1)), sample("b", (0, 1)), sample("c", (0, 0))]
    assert rollout_weights(samples) == {"a": 0.25, "b": 1.0}
