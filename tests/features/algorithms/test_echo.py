"""ECHO: by hand, which tokens of a row tools wrote, and its gradient beside a float64 loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import Choice
from lightning_proxy.features.algorithms.echo import echo
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.step.losses import context_loss
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from support.calls import call
from support.sections import PolicyConfig, TrainerConfig
from support.small_model import save_small_model

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


def row(name: str, ids: tuple[int, ...], *results: tuple[int, int]) -> Sample:
    """A row whose answers teach nothing: tokens 2, and all from 9 on."""
    mask = tuple(int(i == 2 or i >= 9) for i in range(len(ids)))
    zeros, ones = (0.0,) * len(ids), (1.0,) * len(ids)
    return Sample(name, "t", ids, mask, tuple(-3.0 * m for m in mask), zeros, ones, results=results)


# Two siblings share four tokens; the third has no result.
ROWS = (
    row("a", (0, 5, 9, 7, 8, 6, 3, 3, 4, 10, 11), (3, 9)),
    row("b", (0, 5, 9, 7, 12, 13, 3, 3, 4, 10), (3, 5), (6, 9)),
    row("c", (0, 6, 9, 7, 12, 13, 3, 3, 4, 10)),
)


def float64_gradients(model: Path, weight: float) -> dict[str, torch.Tensor]:
    """Those of -weight / 11 · sum of log p, row by row and token by token."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for sample in ROWS:
        logp = policy(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        for start, end in sample.results:
            for i in range(start, end):
                total = total - weight / 11 * logp[i - 1, sample.token_ids[i]]
    total.backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("nodes", [1000, 12], ids=["one pass", "several passes"])
def test_the_gradient_is_that_of_a_loop(tmp_path: Path, nodes: int) -> None:
    model = save_small_model(tmp_path / "model")
    settings = {
        "context_loss": "echo",
        "echo_weight": 0.3,
        "weights": "full",
        "dtype": "float32",
        "report_to": [],
        "max_grad_norm": 1e9,
    }
    config = TrainerConfig.model_validate({**settings, "max_tokens_per_batch": nodes})
    trainer = LightningTrainer(config, PolicyConfig(model=str(model), directory=tmp_path))
    trainer.forward_backward(Batch(1, ROWS, ("a", "b", "c")))
    found = {name: p.grad for name, p in trainer.policy_model.named_parameters() if p.grad is not None}
    expected = float64_gradients(model, 0.3)
    assert found.keys() == expected.keys()
    for name, of_loop in expected.items():
        torch.testing.assert_close(found[name].double(), of_loop, rtol=1e-4, atol=1e-6, msg=name)


def test_the_policy_learns_what_tools_answer_and_nothing_else_is_trained(tmp_path: Path) -> None:
    config = TrainerConfig(context_loss="echo", learning_rate=1e-2, dtype="float32", report_to=[])
    policy = PolicyConfig(model=str(save_small_model(tmp_path / "model")), directory=tmp_path)
    trainer = LightningTrainer(config, policy)
    results = [i for start, end in ROWS[0].results for i in range(start, end)]

    def surprise() -> float:
        (logprobs,) = trainer.logprobs([ROWS[0].token_ids])
        return -sum(logprobs[i] for i in results) / len(results)

    before = surprise()
    metrics = [trainer.step(Batch(step, ROWS, ("a", "b", "c"))) for step in range(1, 9)]
    assert surprise() < before - 0.1
    assert metrics[0]["trained_tokens"] == sum(sample.trained_tokens for sample in ROWS)
    assert all(value == 0.0 for of in trainer.scores_of([ROWS[2]]) for value in of[3:9]), "context is not scored"


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
