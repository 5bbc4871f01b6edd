"""Lets a service take the training steps (`tinker.enabled: true`), and refuses settings that it does not support."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ...core.config.root import Config
from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from ...trainer.plugins import Run, TrainerPlugin
from .config import LOSSES

if TYPE_CHECKING:
    from ...trainer.step.engine import TrainingEngine

# What the service has of its own, or does not have.
AS_IT_IS = (
    "loss", "context_loss", "importance_level", "kl_coef", "kl_metric", "weights", "lora_alpha", "lora_targets",
    "devices", "max_tokens_per_batch", "gradient_checkpointing",
)  # fmt: skip


def check_backend(config: Config, method: str = "rl", *, launched: bool = False) -> None:
    """Raise ConfigError if the service cannot be used with the configuration. `launched`: one of several processes."""
    trainer, usual = config.trainer, TrainerConfig()
    if trainer.trains_here:
        return
    others = {
        f"--method {method}": method != "rl",
        "several trainer processes (torchrun, accelerate launch)": launched,
        f"trainer.loss_type {trainer.loss_type} (it supports {', '.join(LOSSES)})": trainer.loss_type not in LOSSES,
        "trainer.weighting sequence": trainer.weighting == "sequence",
        "trainer.entropy": trainer.entropy.counts,
        "teacher": trainer.has_guide,
        "policy.adapters": bool(config.policy.adapters),
        "policy.publish merged": config.policy.publish == "merged",
    }
    refused = [what for what, is_wanted in others.items() if is_wanted]
    changed = [key for key in AS_IT_IS if getattr(trainer, key) != getattr(usual, key)]
    refused += [f"trainer.{key} {getattr(trainer, key)}" for key in changed]
    if refused:
        raise ConfigError(
            f"tinker.enabled: the service does not support {'; '.join(refused)}. Change it or set tinker.enabled: false"
        )
    if importlib.util.find_spec("tinker") is None:
        raise ConfigError("tinker.enabled needs the service's client: pip install 'lightning-proxy[tinker]'")


class BackendsPlugin(TrainerPlugin):
    def check(self, run: Run) -> None:
        check_backend(self.config, run.method, launched=run.launched)

    def engine(self) -> TrainingEngine | None:
        if self.config.trainer.trains_here:
            return None
        from .tinker_trainer import TinkerTrainer

        return TinkerTrainer(self.config.trainer, self.config.policy)


plugin = BackendsPlugin
