"""Credit and baselines against numbers worked out by hand; credit by a function of the user's own."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import ToolCall
from lightning_proxy.trainer.credit.strategies import STRATEGIES
from lightning_proxy.trainer.functions import check_functions
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.paths import EXAMPLES
from support.rewarded import group_advantages, group_returns
from support.sections import TrainerConfig


def sibling(final: float, *rewards: float) -> Sibling:
    """A rollout with one call a reward."""
    calls = [call(str(i)) for i in range(len(rewards))]
    return Sibling(calls, RolloutRewards(final, {str(i): r for i, r in enumerate(rewards)}))


def config(**trainer: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(trainer)


@pytest.mark.parametrize(
    ("credit", "returns"),
    [("uniform", [[4.0, 4.0], [1.0]])] + [(name, [[3.0, 4.0], [1.0]]) for name in STRATEGIES if name != "uniform"],
)
def test_the_return_of_a_call_is_what_its_strategy_compares(credit: str, returns: list[list[float]]) -> None:
    group = [sibling(4.0, 1.0, 0.0), sibling(1.0, 0.0)]
    assert group_returns(group, config(credit=credit, discount=0.5, judge={"model": "openai/j"})) == returns


def with_tools(reward: float, *tools: bool) -> Sibling:
    """A rollout with one call for each of `tools`: whether it uses one."""
    used = ((ToolCall("1", "f", "{}"),) if uses else () for uses in tools)
    calls = [call(str(i), seq=i, prompt_token_ids=(i,), tool_calls=own) for i, own in enumerate(used)]
    return Sibling(calls, RolloutRewards(reward, {}))


GROUP = [with_tools(1.0, False, True, True), with_tools(0.0, False, False)]


def test_the_example_gives_credit_to_one_call() -> None:
    won = 0.5 / math.sqrt(0.5)  # the sample's standard deviation of 1 and 0 is √0.5
    example = f"{EXAMPLES}/hooks/credit.py:first_tool_call"
    for credit in (example, {"*": example, "planner": "uniform"}):
        own = config(credit=credit)
        check_functions(own)
        assert group_advantages(GROUP, own) == [[0.0, won, 0.0], [0.0, -won]]
        assert group_returns(GROUP, own) == [[1.0] * 3, [0.0] * 2]


def test_a_wrong_answer_is_named(tmp_path: Path) -> None:
    for i, (body, told) in enumerate((
        ("[[0.0] * 3]", "one list for each of the 2 rollouts is needed, got [[0.0, 0.0, 0.0]]"),
        ("[[0.0] * 3, [0.0]]", "a rollout of 2 calls needs 2 numbers, got [0.0]"),
        ("[[0.0] * 3, [0.0, float('nan')]]", "nan is not a finite number"),
        ("[[0.0] * 3, [0.0, 'x']]", "'x' is not a finite number"),
        ("group[9]", "it raised IndexError: list index out of range (line 1)"),
    )):  # fmt: skip
        file = tmp_path / f"mine{i}.py"
        file.write_text(f"f = lambda group, config: {body}\n")
        with pytest.raises(ConfigError) as error:
            group_advantages(GROUP, config(credit=f"{file}:f"))
        assert str(error.value) == f"trainer.credit {file}:f: {told}"


def test_what_cannot_be_loaded_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    for name, text, told in (
        ("gone", None, "^trainer.credit: there is no file "),
        ("broken", "import nothing_like_it\n", r"ModuleNotFoundError: .*nothing_like_it.* \(line 1\)$"),
        ("other", "f = 3\n", "^trainer.credit: .*other.py has no function f$"),
    ):
        file = tmp_path / f"{name}.py"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            check_functions(config(credit=f"{file}:f"))
    with pytest.raises(ValidationError, match="got .unifrom."):
        config(credit="unifrom")
