"""The learning rate: by hand for models of three widths, and which of rule, checkpoint and setting counts."""

from __future__ import annotations

import pytest

from lightning_proxy.trainer.rate import Rate, automatic_rate, rate_of
from support.sections import TrainerConfig

WIDTH = 576  # SmolLM2-135M


@pytest.mark.parametrize(
    ("width", "lora", "full"),
    [
        (576, 2.0e-4, 1.3e-5),  # 2000 / 576 = 3.472; ln 1.245; times 0.781 0.972; e^0.972 = 2.644
        (2000, 7.5e-5, 5.0e-6),  # the width at which nothing is scaled
        (4096, 4.3e-5, 2.9e-6),  # 2000 / 4096 = 0.488; ln -0.717; times 0.781 -0.560; e^-0.560 = 0.571
    ],
)
def test_the_rate_falls_with_the_width_and_is_smaller_for_all_weights(width: int, lora: float, full: float) -> None:
    assert (automatic_rate(width), automatic_rate(width, "full")) == (lora, full)


def test_auto_says_what_it_is_for() -> None:
    lora, full = TrainerConfig(), TrainerConfig(weights="full")
    assert rate_of(lora, WIDTH) == Rate(2e-4, "`auto` for LoRA of rank 16 and alpha 32 at width 576")
    assert rate_of(full, WIDTH) == Rate(1.3e-5, "`auto` for all weights at width 576")


def test_a_checkpoints_rate_counts_until_one_is_set() -> None:
    kept = rate_of(TrainerConfig(), WIDTH, kept=1e-5)
    assert kept.value == 1e-5
    assert "the checkpoint's" in kept.reason and "0.0002" in kept.reason
    assert rate_of(TrainerConfig(learning_rate=3e-5), WIDTH, kept=1e-5).value == 3e-5
    assert rate_of(TrainerConfig(), WIDTH, kept=2e-4) == rate_of(TrainerConfig(), WIDTH)
