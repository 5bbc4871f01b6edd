"""Credit and baselines against numbers worked out by hand."""

import pytest

from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.proxy.types import ModelCall
from lightning_proxy.trainer.advantage import group_baselines
from lightning_proxy.trainer.credit import RolloutRewards, credit_strategy


def call(call_id: str) -> ModelCall:
    return ModelCall(
        call_id, "r", 0, None, "chat.completions", "ok", "policy", 0, (0,), {}, {}, (1,), (), None, (),
        None, True, None, None, 200, 0.0, None, None,
    )  # fmt: skip


def advantages(name: str, returns: list[float]) -> list[float]:
    baselines = group_baselines(name, returns)
    assert baselines is not None
    return [baseline.advantage(r) for baseline, r in zip(baselines, returns, strict=True)]


def test_uniform_copies_the_final_return_to_every_call() -> None:
    rewards = RolloutRewards(0.7, {"a": 5.0})
    assert credit_strategy("uniform")([call("a"), call("b"), call("c")], rewards) == [0.7, 0.7, 0.7]


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'best'.*uniform"):
        credit_strategy("best")


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # mean 0.5, sample variance (4 * 0.25) / 3
    expected = 0.5 / (3**-0.5 + 1e-4)
    assert advantages("grpo", [0.0, 1.0, 1.0, 0.0]) == pytest.approx([-expected, expected, expected, -expected])


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert advantages("dr_grpo", [0.0, 1.0, 2.0]) == pytest.approx([-1.0, 0.0, 1.0])


def test_rloo_compares_with_the_others() -> None:
    assert advantages("rloo", [0.0, 1.0, 2.0]) == pytest.approx([-1.5, 0.0, 1.5])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("returns", [[], [1.0], [0.1 + 0.2, 0.3], [0.0] * 8])
def test_groups_that_teach_nothing_have_no_baseline(name: str, returns: list[float]) -> None:
    assert group_baselines(name, returns) is None


def test_an_unknown_baseline_is_named() -> None:
    with pytest.raises(ConfigError, match="'mean'"):
        group_baselines("mean", [0.0, 1.0])
