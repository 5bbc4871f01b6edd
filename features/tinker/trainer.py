"""Plugs services in that take the training steps (`tinker.enabled: true`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...trainer.plugins import Run, TrainerPlugin
from .refusals import check_backend

if TYPE_CHECKING:
    from ...trainer.step.engine import TrainingEngine


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
