"""Plugs services in that take the training steps (`tinker.enabled: true`), and refuses what they cannot do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...core.config.root import Config
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...trainer.plugins import Run, TrainerPlugin
from .config import LOSSES

if TYPE_CHECKING:
    from ...trainer.step.engine import TrainingEngine


def check_backend(config: Config, method: str = "rl", *, launched: bool = False) -> None:
    """Raise ConfigError if the service cannot do what is configured. `launched`: one of several processes."""
    if config.trainer.trains_here:
        return
    refused = [*_methods(method, launched), *_losses(config.trainer), *_weights(config), *_memory(config.trainer)]
    if refused:
        raise ConfigError(
            f"tinker.enabled: the service cannot do {'; '.join(refused)}. Take it out, or set tinker.enabled: false"
        )
    if importlib.util.find_spec("tinker") is None:
        raise ConfigError("tinker.enabled: the service needs its client: pip install 'lightning-proxy[tinker]'")


def _methods(method: str, launched: bool) -> Iterator[str]:
    if method != "rl":
        yield f"--method {method}"
    if launched:
        yield "several trainer processes (torchrun, accelerate launch)"


def _losses(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.loss is not None:
        yield f"trainer.loss {trainer.loss}"
    if trainer.context_loss is not None:
        yield f"trainer.context_loss {trainer.context_loss}"
    if trainer.loss_type not in LOSSES:
        yield f"trainer.loss_type {trainer.loss_type} (it can do {', '.join(LOSSES)})"
    if trainer.weighting == "sequence":
        yield "trainer.weighting sequence"
    if trainer.importance_level != "token":
        yield f"trainer.importance_level {trainer.importance_level}"
    if trainer.kl_coef:
        yield f"trainer.kl_coef {trainer.kl_coef:g}"
    if trainer.kl_metric:
        yield "trainer.kl_metric"
    if trainer.entropy.counts:
        yield "trainer.entropy"
    if trainer.has_guide:
        yield "teacher"


def _weights(config: Config) -> Iterator[str]:
    trainer, default = config.trainer, TrainerConfig()
    if trainer.weights != "lora":
        yield f"trainer.weights {trainer.weights}"
    if trainer.lora_alpha != default.lora_alpha:
        yield f"trainer.lora_alpha {trainer.lora_alpha} (the service has its own)"
    if trainer.lora_targets != default.lora_targets:
        yield "trainer.lora_targets (the service trains attention and MLP)"
    if config.policy.adapters:
        yield "policy.adapters"
    if config.policy.publish == "merged":
        yield "policy.publish merged"


def _memory(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.devices:
        yield "trainer.devices"
    if trainer.max_tokens_per_batch is not None:
        yield "trainer.max_tokens_per_batch"
    if trainer.gradient_checkpointing != "auto":
        yield "trainer.gradient_checkpointing"


class BackendsPlugin(TrainerPlugin):
    """Takes the steps on a service with the Tinker API."""

    def check(self, run: Run) -> None:
        check_backend(self.config, run.method, launched=run.launched)

    def engine(self) -> TrainingEngine | None:
        if self.config.trainer.trains_here:
            return None
        from .tinker_trainer import TinkerTrainer

        return TinkerTrainer(self.config.trainer, self.config.policy)


plugin = BackendsPlugin
