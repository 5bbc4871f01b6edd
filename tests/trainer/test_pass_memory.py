"""The plan's arithmetic against training passes on tensors that have sizes and no values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from lightning_proxy.trainer.plan import FLOAT32, pass_memory, shape_of  # noqa: E402
from support.fake_memory import peak_of_a_pass  # noqa: E402
from support.model_sizes import SIZES  # noqa: E402
from support.sections import TrainerConfig  # noqa: E402

TOKENS = 8192
SLOW = pytest.mark.long
SOME = [("Qwen2.5-1.5B", True)]
# Each takes half a minute, so the others are for test-all.
OTHERS = [(name, on) for name in SIZES for on in (True, False) if (name, on) not in SOME]


@pytest.mark.parametrize(("name", "checkpointing"), [*SOME, *(pytest.param(*other, marks=SLOW) for other in OTHERS)])
def test_a_pass_takes_what_the_plan_says(name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(SIZES[name])
    assert shape is not None
    config = TrainerConfig(gradient_checkpointing=checkpointing)
    found = peak_of_a_pass(SIZES[name], TOKENS, config, monkeypatch)
    assert pass_memory(shape, TOKENS, checkpointing=checkpointing) == pytest.approx(found, rel=0.15)


@SLOW
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_pass_on_a_cpu_takes_what_the_plan_says(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES["Qwen2.5-1.5B"]
    shape = shape_of(sizes)
    assert shape is not None
    config = TrainerConfig(gradient_checkpointing=checkpointing)
    found = peak_of_a_pass(sizes, TOKENS, config, monkeypatch, autocast=False)
    planned = pass_memory(shape, TOKENS, checkpointing=checkpointing, width=FLOAT32)
    assert planned == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=SLOW)])
def test_a_pass_of_all_weights_takes_what_the_plan_says(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES["Qwen2.5-1.5B"]
    shape = shape_of(sizes)
    assert shape is not None
    config = TrainerConfig(weights="full", gradient_checkpointing=checkpointing)
    found = peak_of_a_pass(sizes, TOKENS, config, monkeypatch)
    gradients = FLOAT32 * shape.parameters
    said = gradients + pass_memory(shape, TOKENS, checkpointing=checkpointing, full=True)
    assert said == pytest.approx(found, rel=0.15)
