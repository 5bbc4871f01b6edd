"""The algorithms in `trainer/algorithms/`, and their settings: NAME is the function NAME of NAME.py there."""

from __future__ import annotations

from pydantic import model_validator

from ...core.config.section import Positive, Section
from ...core.config.trainer import TrainerConfig


class MaskConfig(Section):
    tv: Positive = 0.15
    kl: Positive = 0.05
    ratio_low: Positive = 0.5
    ratio_high: Positive = 5.0


class AlgorithmKeys(TrainerConfig):
    names = {
        "credit": ("gdpo", "rae"), "baseline": ("maxrl",),
        "loss": ("dppo_tv", "dppo_kl", "icepop"), "context_loss": ("echo",),
    }  # fmt: skip

    mask: MaskConfig = MaskConfig()
    echo_weight: Positive = 0.1

    @model_validator(mode="after")
    def _masks_single_tokens(self) -> AlgorithmKeys:
        if self.loss in AlgorithmKeys.names["loss"] and self.importance_level != "token":
            raise ValueError(f"loss {self.loss} drops single tokens: it needs importance_level: token")
        return self
