"""Trains in several processes, or with a sharded model, under `torchrun` or `accelerate launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...trainer.plugins import TrainerPlugin

if TYPE_CHECKING:
    from ...trainer.step.engine import TrainingEngine


class DistributedPlugin(TrainerPlugin):
    def engine(self) -> TrainingEngine | None:
        from ...trainer.step.trainer import LightningTrainer
        from . import ranks

        if not ranks.launched():
            return None
        return LightningTrainer(self.config.trainer, self.config.policy, ranks.Ranks())


plugin = DistributedPlugin
