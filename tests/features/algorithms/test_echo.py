"""Which tokens of a row tools wrote, and what ECHO adds for them.

`tests/reference/test_gradients.py` has its gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import Choice
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
AFTER_R = {"previous_response_id": "r"}


def rows(*asked: tuple[Json, tuple[int, ...], tuple[int, ...]]) -> list[Sample]:
    calls = [
        call("c", prompt=prompt, request=request, choices=(Choice(0, answer, (-1.0,) * len(answer)),))
        for request, prompt, answer in asked
    ]
    return list(rollout_samples(calls, [1] * len(calls), task_id="t", max_tokens=99).samples)


@pytest.mark.parametrize(
    ("second", "written"),
    [
        ({"messages": [USER, CALL, RESULT, RESULT]}, True),
        ({"messages": [USER, CALL, ANTHROPIC]}, True),
        ({"input": [USER, {"type": "reasoning"}, FUNCTION, OUTPUT]}, True),
        ({"input": [OUTPUT], **AFTER_R}, True),
        ({"input": [USER, OUTPUT], **AFTER_R}, False),
        ({"messages": [USER, CALL, RESULT, USER]}, False),
        ({"messages": [USER, CALL, ANTHROPIC_AND_TEXT]}, False),
        ({"messages": [USER, CALL, RESULT, CALL, RESULT]}, False),
        ({"messages": [USER, "no message"]}, False),
    ],
)
def test_results_are_what_tools_alone_wrote_between_two_answers(second: Json, written: bool) -> None:
    key = "messages" if "messages" in second else "input"
    found = rows(({key: [USER]}, (1, 2), (3,)), (second, (1, 2, 3, 7, 8, 9), (4,)))
    assert [sample.results for sample in found] == [((3, 6),) if written else ()]


def test_the_prompt_of_a_row_is_no_result() -> None:
    """A history that was edited opens a row; what is before its first answer was another row's to learn."""
    turns = [CALL, RESULT]
    found = rows(
        ({"messages": [USER]}, (1, 2), (3,)),
        ({"messages": [USER, *turns]}, (1, 5, 3, 7), (4,)),
        ({"messages": [USER, *turns, *turns]}, (1, 5, 3, 7, 4, 8, 9), (6,)),
    )
    assert [sample.results for sample in found] == [(), ((5, 7),)]


def row(name: str, *results: tuple[int, int]) -> Sample:
    """A row of 11 tokens whose answers, the third token and the last two, teach nothing."""
    zeros, mask = (0.0,) * 11, (0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1)
    return Sample(name, "t", tuple(range(11)), mask, zeros, zeros, (1.0,) * 11, results=results)


ROWS = (row("a", (3, 9)), row("b", (3, 5), (6, 9)), row("c"))


def test_what_a_pass_adds_is_shared_by_all_tokens_of_the_steps_results(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def twice(logprobs, results, config):\n    return 2 * logprobs.sum() / results\n"
        "def many(logprobs, results, config):\n    return logprobs\n"
    )

    def added(name: str, rows: tuple[Sample, ...] = ROWS[:2]) -> float:
        config = TrainerConfig.model_validate({"context_loss": name.replace("own", f"{tmp_path}/own.py")})
        return float(context_loss(torch.ones(2, 11), rows, 22, config))

    assert [added("echo"), added("own:twice"), added("own:twice", ROWS[2:])] == pytest.approx([-0.1 * 11 / 22, 1, 0])
    with pytest.raises(ConfigError, match=r"context_loss .*own\.py:many: one number is needed"):
        added("own:many")
