"""Decides the learning rate of RL: the configured one, a checkpoint's, or one computed for the model (`auto`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..core.config.trainer import TrainerConfig

RATE, WIDTH, ALPHA = {"lora": 7.5e-5, "full": 5e-6}, 2000, 32  # at this width; of an adapter, at this alpha
EXPONENT = 0.781


@dataclass(frozen=True, slots=True)
class Rate:
    """A learning rate before `trainer.lr_scheduler` and warm-up, with the reason for it in words."""

    value: float
    reason: str


def automatic_rate(width: int, weights: Literal["lora", "full"] = "lora", alpha: int = ALPHA) -> float:
    """Return the learning rate of AdamW, to two digits, for RL on a model with hidden states of `width` numbers.

    LoRA: 7.5e-5 · (2000 / width)^0.781 · (32 / alpha). All weights: 5e-6 · (2000 / width)^0.781.

    - 7.5e-5: 1.5 times the rate in TRL's guide "LoRA Without Regret", by the runs in docs/results.md. All weights: a
      tenth of the guide's 5e-5, as it recommends.
    - The power of the width: Tinker cookbook's `hyperparam_utils` until 2026, fitted to supervised runs of Llama.
      The cookbook's RL recipes use 1e-4 for 1B and 2e-5 for 8B, where this gives 7.4e-5 and 4.3e-5.
    - The rank does not matter: PEFT scales by alpha / rank, and so the best rate hardly depends on it (Schulman et al.
      2025, https://thinkingmachines.ai/blog/lora/). 32 / alpha keeps the size of the first step.

    Width 576 and alpha 32: 7.5e-5 · 3.47^0.781 = 7.5e-5 · 2.64 = 2.0e-4; all weights: 1.3e-5.
    """
    scaled = RATE[weights] * (WIDTH / width) ** EXPONENT
    return float(f"{scaled * ALPHA / alpha if weights == 'lora' else scaled:.1e}")


def rate_of(config: TrainerConfig, width: int, kept: float | None = None) -> Rate:
    """Return the rate of a run. `kept` is the rate of the checkpoint that it resumes from."""
    if config.learning_rate != "auto":
        return Rate(config.learning_rate, "`trainer.learning_rate`")
    rule = automatic_rate(width, config.weights, config.lora_alpha)
    if kept is not None and kept != rule:
        why = f"the checkpoint's, which `auto` keeps (its rule gives {rule:g}); set trainer.learning_rate to change it"
        return Rate(kept, why)
    lora = f"LoRA of rank {config.lora_rank} and alpha {config.lora_alpha}"
    what = lora if config.weights == "lora" else "all weights"
    return Rate(rule, f"`auto` for {what}{'' if config.trains_here else ' on a service'} at width {width}")


def rate_after(config: TrainerConfig, rate: float, updates: int) -> float:
    """Return the learning rate after this many updates, by `trainer.lr_scheduler`; `rate` is the maximum."""
    if updates < config.warmup_steps:
        return rate * updates / config.warmup_steps
    if config.max_steps is None or config.lr_scheduler not in ("linear", "cosine"):
        return rate
    done = min((updates - config.warmup_steps) / max(config.max_steps - config.warmup_steps, 1), 1.0)
    return rate * (1 - done if config.lr_scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2)
