"""The section `algorithms`: settings of the algorithms in this folder. The one named NAME is in NAME.py."""

from __future__ import annotations

from ...core.config.root import Config
from ...core.config.section import FeatureSection, Positive, Section


class MaskConfig(Section):
    tv: Positive = 0.15
    kl: Positive = 0.05
    ratio_low: Positive = 0.5
    ratio_high: Positive = 5.0


class AlgorithmsConfig(FeatureSection):
    name = "algorithms"
    functions = {
        "credit": ("gdpo", "rae"), "baseline": ("maxrl",),
        "loss": ("dppo_tv", "dppo_kl", "icepop"), "context_loss": ("echo",),
    }  # fmt: skip
    moved = {"trainer.mask": "algorithms.mask", "trainer.echo_weight": "algorithms.echo_weight"}

    mask: MaskConfig = MaskConfig()
    echo_weight: Positive = 0.1

    def check(self, config: Config) -> None:
        trainer = config.trainer
        if trainer.loss in self.functions["loss"] and trainer.importance_level != "token":
            raise ValueError(f"trainer.loss {trainer.loss} drops tokens, so it needs trainer.importance_level: token")
