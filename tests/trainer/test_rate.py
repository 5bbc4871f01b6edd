"""The learning rate: by hand for models of three widths, and which of rule, checkpoint and setting counts."""

from __future__ import annotations

import pytest

from lightning_proxy.trainer.rate import Rate, automatic_rate, rate_of, warn_of_rate
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


def test_an_adapter_with_half_the_alpha_takes_twice_the_rate() -> None:
    assert automatic_rate(2000, alpha=16) == 1.5e-4
    assert automatic_rate(2000, "full", alpha=16) == 5e-6


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


def test_the_rates_own_rule_is_not_too_high_for_all_weights(caplog: pytest.LogCaptureFixture) -> None:
    full = TrainerConfig(weights="full")
    warn_of_rate(full, rate_of(full, WIDTH).value)
    assert not caplog.messages
    warn_of_rate(full, rate_of(TrainerConfig(), WIDTH).value)
    assert caplog.messages == ["the learning rate 0.0002 is high for trainer.weights: full: 2e-6 to 2e-5 is usual"]
