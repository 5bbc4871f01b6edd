"""Algorithms by their names, with examples by hand.

`tests/reference/` has the losses' gradients, and the advantages of every credit with every baseline.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import Choice, Reward
from lightning_proxy.core.returns import Rules
from lightning_proxy.features.algorithms.config import AlgorithmsConfig
from lightning_proxy.trainer.rows.samples import rollout_samples
from lightning_proxy.trainer.step.losses import LossInputs, context_loss, policy_loss
from lightning_proxy.trainer.types import RolloutRewards, Sample, Sibling
from support.calls import call
from support.paths import ROOT
from support.rewarded import Traffic, advantages, group_advantages, traffic
from support.sections import TrainerConfig

__all__ = ["traffic"]

REFUSED = [("loss_type", "vespo", "sequence"), ("loss_type", "luspo", "token")]
REFUSED += [("loss", name, "sequence") for name in TrainerConfig.known("loss")]


def test_each_algorithm_has_a_name_and_a_word_in_the_documents() -> None:
    names = [name for kind in AlgorithmsConfig.functions.values() for name in kind]
    files = {path.stem for path in (ROOT / "features" / "algorithms").glob("[a-z]*.py")}
    assert {*names} == files - {"config"}
    pages = [(ROOT / "docs" / f"{page}.md").read_text() for page in ("credit", "settings")]
    assert [name for name in names for page in pages if f"`{name}`" not in page] == []


@pytest.mark.parametrize("kind", sorted(AlgorithmsConfig.functions))
def test_an_unknown_name_is_refused_with_those_there_are(kind: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TrainerConfig.model_validate({kind: "best"})
    (error,) = refused.value.errors()
    assert error["msg"].startswith(f"Value error, must be one of {', '.join(TrainerConfig.known(kind))}")
    assert error["msg"].endswith("got 'best'") and "\n" not in error["msg"]


@pytest.mark.parametrize(("key", "loss", "level"), REFUSED)
def test_a_loss_is_refused_at_a_level_that_it_is_not_for(key: str, loss: str, level: str) -> None:
    with pytest.raises(ValidationError, match=f"{key} {loss} .*importance_level: "):
        TrainerConfig.model_validate({key: loss, "importance_level": level})


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "icepop"])
def test_probabilities_of_one_and_almost_none_have_finite_gradients(loss: str) -> None:
    logprobs = torch.tensor([[0.0, -200.0, 0.0]], requires_grad=True)
    sampled, ones = torch.tensor([[0.0, 0.0, -200.0]]), torch.ones(1, 3)
    config = TrainerConfig.model_validate({"loss": loss})
    value = policy_loss(LossInputs(logprobs, sampled, -ones, ones, config, ones))
    value.backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and value.isfinite()


# Credits: GDPO, RAE --------------------------------------------------------------------------------------------------

WEIGHTS = {"right": 1.0, "style": 0.5}


def gdpo(group: list[Sibling], **changed: Any) -> list[list[float | None]]:
    settings = {"credit": "gdpo", "reward_weights": WEIGHTS, **changed}
    return group_advantages(group, TrainerConfig.model_validate(settings))


def sibling(*posted: Reward) -> Sibling:
    calls = [call("0", "plan"), call("1", "act")]
    return Sibling(calls, RolloutRewards.counted(posted, Rules(WEIGHTS)))


def test_automatic_rewards_are_one_more_name() -> None:
    first, second = (sibling(Reward("r", value, name="right")) for value in (1.0, 0.0))
    first = replace(first, rewards=replace(first.rewards, air={"0": -0.2}))
    assert gdpo([first, second], baseline="dr_grpo") == [pytest.approx([0.4] * 2), pytest.approx([-0.4] * 2)]


def test_agents_may_each_have_their_own_rewards_by_name() -> None:
    rewards = [((1.0, "0"), (0.0, "1")), ((0.0, "0"), (4.0, "1"))]
    group = [sibling(*(Reward("r", value, call_id, name="right") for value, call_id in own)) for own in rewards]
    found = gdpo(group, baseline="dr_grpo", agents=["plan", "act"], agent_credit="own")
    assert found == [[0.5, -2.0], [-0.5, 2.0]]


async def test_a_step_compares_each_name_of_the_stores_rewards(traffic: Traffic) -> None:
    for name, right, style in (("a", 1.0, 0.0), ("b", 0.0, 4.0)):
        await traffic.rollout(name, "t", right, reward_name="right")
        await traffic.post(Reward(name, style, name="style", final=False))
    # With weights 1 and 0.25 the sums are equal, and comparing these would teach nothing.
    batch = await traffic.batch(credit="gdpo", baseline="grpo", reward_weights={"right": 1.0, "style": 0.25})
    one = 0.5**0.5  # half a distance by the standard deviation of two values
    assert advantages(batch) == pytest.approx({"a-0": 0.75 * one, "b-0": -0.75 * one}, rel=1e-3)


def test_games_are_compared_in_the_order_in_which_they_began() -> None:
    games = [
        Sibling([call("c", started_at=at)], RolloutRewards(own)) for at, own in ((20.0, 1.0), (0.0, 1.0), (10.0, -1.0))
    ]
    found = group_advantages(games, TrainerConfig.model_validate({"credit": "rae"}))
    assert found == [[pytest.approx(1 - (0.95 - 1) / 1.95)], [0.0], [-2.0]]


async def test_a_step_compares_rollouts_without_a_task_with_earlier_ones_of_the_store(traffic: Traffic) -> None:
    for i in range(4):
        await traffic.rollout(f"before-{i}", None, float(i))
    await traffic.rollout("new", None, 4.0)
    batch = await traffic.batch(credit="rae", lone_rollouts="running", group_size=5)
    weights = [0.95**age for age in (3, 2, 1, 0)]
    mean = sum(weight * value for weight, value in zip(weights, range(4), strict=True)) / sum(weights)
    assert advantages(batch) == pytest.approx({"new-0": 4.0 - mean})


# ECHO: which tokens of a row tools wrote -----------------------------------------------------------------------------

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
    with pytest.raises(ConfigError, match=r"context_loss .*own\.py:many: it must return a scalar tensor"):
        added("own:many")
