"""Credit by a function of the user's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import ToolCall
from lightning_proxy.trainer.functions import check_functions
from lightning_proxy.trainer.types import RolloutRewards, Sibling
from support.calls import call
from support.paths import EXAMPLES
from support.rewarded import group_advantages, group_returns
from support.sections import TrainerConfig

TOOL = ToolCall("1", "f", "{}")


def sibling(reward: float, *tools: bool) -> Sibling:
    """A rollout with one call for each of `tools`: whether it uses one."""
    calls = [
        call(str(i), seq=i, prompt_token_ids=(i,), tool_calls=(TOOL,) if uses else ()) for i, uses in enumerate(tools)
    ]
    return Sibling(calls, RolloutRewards(reward, {}))


def config(credit: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"credit": credit})


GROUP = [sibling(1.0, False, True, True), sibling(0.0, False, False)]
WON = 0.5 / math.sqrt(0.5)  # the sample's standard deviation of 1 and 0 is √0.5


def test_the_example_gives_credit_to_one_call() -> None:
    own = config(f"{EXAMPLES}/hooks/credit.py:first_tool_call")
    check_functions(own)
    assert group_advantages(GROUP, own) == [[0.0, WON, 0.0], [0.0, -WON]]
    assert group_returns(GROUP, own) == [[1.0] * 3, [0.0] * 2]
    by_agent = config({"*": f"{EXAMPLES}/hooks/credit.py:first_tool_call", "planner": "uniform"})
    check_functions(by_agent)
    assert group_advantages(GROUP, by_agent) == [[0.0, WON, 0.0], [0.0, -WON]]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return [[0.0] * 3]", "one list for each of the 2 rollouts is needed, got [[0.0, 0.0, 0.0]]"),
        ("return [[0.0] * 3, [0.0]]", "a rollout of 2 calls needs 2 numbers, got [0.0]"),
        ("return [[0.0] * 3, [0.0, float('nan')]]", "nan is not a finite number"),
        ("return [[0.0] * 3, [0.0, 'x']]", "'x' is not a finite number"),
        ("return group[9]", "IndexError: list index out of range (line 2)"),
    ],
)
def test_a_wrong_answer_is_named(tmp_path: Path, body: str, told: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def f(group, config):\n    {body}\n")
    with pytest.raises(ConfigError) as error:
        group_advantages(GROUP, config(f"{file}:f"))
    assert str(error.value) == f"trainer.credit {file}:f: {told}"


def test_what_cannot_be_loaded_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    with pytest.raises(ConfigError, match="^trainer.credit: there is no file "):
        check_functions(config(f"{file}:f"))
    file.write_text("import nothing_like_it\n")
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: .*nothing_like_it.* \(line 1\)$"):
        check_functions(config(f"{file}:f"))
    other = tmp_path / "other.py"
    other.write_text("f = 3\n")
    with pytest.raises(ConfigError, match="^trainer.credit: .*other.py has no function f$"):
        check_functions(config(f"{other}:f"))
    with pytest.raises(ValidationError, match="got .unifrom."):
        config("unifrom")
