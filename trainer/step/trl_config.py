"""Translates the trainer's configuration for TRL and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import GRPOConfig

from ...core.config.trainer import TrainerConfig
from ..report.trackers import PROJECT
from ..weights import uses_autocast

ENDLESS = 10**9  # steps, for schedules of a run without `trainer.max_steps`


def grpo_config(config: TrainerConfig, rate: float, output_dir: Path, run_name: str) -> GRPOConfig:
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(output_dir),
        use_cpu=not cuda,
        bf16=uses_autocast(config),
        gradient_checkpointing=False,  # `train()` would switch it on; `checkpoint_layers` does
        disable_dropout=True,
        learning_rate=rate,
        lr_scheduler_type=config.lr_scheduler,
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        report_to=config.report_to or "none",
        run_name=run_name,
        project=PROJECT,
        # These have no effect outside `train()`, but TRL checks that they fit together.
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=config.max_steps or ENDLESS,
        save_strategy="no",
        disable_tqdm=True,
    )


def checkpoint_layers(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Make the layers of `model` compute their activations again in the backward pass, where this is configured.

    It acts in training mode only: scoring without gradients keeps nothing anyway.
    """
    wanted = config.gradient_checkpointing
    if wanted is True or (wanted == "auto" and torch.cuda.is_available()):
        # Without dropout a layer draws no random numbers, so there is no state to keep.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def rewards_come_from_the_store(**_: Any) -> list[float]:
    """Refuse to compute rewards: TRL wants a function for them, and would call it in `train()`."""
    raise NotImplementedError("rewards are posted to the proxy; call step(), not train()")
