"""ECHO by hand, and which tokens of a row tools wrote. `tests/reference/test_gradients.py` has its gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import Choice
from lightning_proxy.features.algorithms.echo import echo
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.step.losses import context_loss
from lightning_proxy.trainer.types import Sample
from support.calls import call
from support.sections import TrainerConfig

Json = dict[str, Any]
USER = {"role": "user", "content": "2 + 3?"}
CALL = {"role": "assistant", "tool_calls": []}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "5"}
ANTHROPIC: Json = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]}
ANTHROPIC_AND_TEXT = {"role": "user", "content": [*ANTHROPIC["content"], {"type": "text", "text": "Go on."}]}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}
FUNCTION = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def test_an_example_worked_by_hand() -> None:
    logprobs = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    added = echo(logprobs, 2, TrainerConfig.model_validate({"context_loss": "echo"}))
    assert float(added) == pytest.approx(0.1 / 2 * (math.log(2) + math.log(4)))
    assert float(added) == pytest.approx(0.104, abs=5e-4)


@pytest.mark.parametrize(
    ("key", "then", "written"),
    [
        ("messages", [CALL, RESULT], True),
        ("messages", [CALL, RESULT, RESULT], True),
        ("messages", [CALL, ANTHROPIC], True),
        ("input", [{"type": "reasoning"}, FUNCTION, OUTPUT], True),
        ("messages", [CALL, RESULT, USER], False),
        ("messages", [CALL, USER], False),
        ("messages", [CALL], False),
        ("messages", [CALL, ANTHROPIC_AND_TEXT], False),
        ("messages", [CALL, RESULT, CALL, RESULT], False),
        ("messages", [CALL, CALL, RESULT], False),
        ("messages", ["no message"], False),
    ],
)
def test_results_are_what_tools_alone_wrote_between_two_answers(key: str, then: list[Any], written: bool) -> None:
    first, second = ({key: items} for items in ([USER], [USER, *then]))
    rows = rollout_samples([asked(first, (1, 2), (3,)), asked(second, (1, 2, 3, 7, 8, 9), (4,))], [1, 1], **TASK)
    assert [sample.results for sample in rows.samples] == [((3, 6),) if written else ()]


@pytest.mark.parametrize(("new", "written"), [([OUTPUT], True), ([USER, OUTPUT], False)])
def test_a_request_that_names_the_response_before_has_new_items_alone(new: list[Any], written: bool) -> None:
    first, second = {"input": [USER]}, {"input": new, "previous_response_id": "r"}
    rows = rollout_samples([asked(first, (1, 2), (3,)), asked(second, (1, 2, 3, 7), (4,))], [1, 1], **TASK)
    assert [sample.results for sample in rows.samples] == [((3, 4),) if written else ()]


def test_the_prompt_of_a_row_is_no_result() -> None:
    """A history that was edited opens a row; what is before its first answer was another row's to learn."""
    calls = [
        asked({"messages": [USER]}, (1, 2), (3,)),
        asked({"messages": [USER, CALL, RESULT]}, (1, 5, 3, 7), (4,)),
        asked({"messages": [USER, CALL, RESULT, CALL, RESULT]}, (1, 5, 3, 7, 4, 8, 9), (6,)),
    ]
    assert [sample.results for sample in rollout_samples(calls, [1, 1, 1], **TASK).samples] == [(), ((5, 7),)]


TASK: Json = {"task_id": "t", "max_tokens": 99}


def asked(request: Json, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Any:
    return call("c", prompt=prompt, request=request, choices=(Choice(0, answer, (-1.0,) * len(answer)),))


def row(name: str, *results: tuple[int, int]) -> Sample:
    """A row of 11 tokens whose answers, the third token and the last two, teach nothing."""
    zeros, mask = (0.0,) * 11, (0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1)
    return Sample(name, "t", tuple(range(11)), mask, zeros, zeros, (1.0,) * 11, results=results)


ROWS = (row("a", (3, 9)), row("b", (3, 5), (6, 9)), row("c"))


def test_a_function_of_ones_own_adds_one_number_or_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def twice(logprobs, results, config):\n    return 2 * logprobs.sum() / results\n")
    logprobs = torch.ones(2, 11)
    config = TrainerConfig(context_loss=f"{tmp_path / 'own.py'}:twice")
    assert float(context_loss(logprobs, ROWS[:2], 9, config)) == pytest.approx(2 * 11 / 9)
    assert float(context_loss(logprobs, ROWS[2:], 9, config)) == 0.0
    (tmp_path / "own.py").write_text("def many(logprobs, results, config):\n    return logprobs\n")
    config = TrainerConfig(context_loss=f"{tmp_path / 'own.py'}:many")
    with pytest.raises(ConfigError, match=r"context_loss .*own\.py:many: one number is needed"):
        context_loss(logprobs, ROWS[:2], 9, config)
