"""The section `tune`: fine-tuning by imitation, and by preferences."""

from __future__ import annotations

from ...core.config.section import Count, FeatureSection, Number, Positive, Section


class MethodConfig(Section):
    epochs: Count = 3
    learning_rate: Positive = 5e-5


class SftConfig(MethodConfig):
    min_reward: Number | None = None
    top: Count = 4
    learning_rate: Positive = 2e-4


class DpoConfig(MethodConfig):
    margin: Positive = 0.1
    pairs_per_task: Count = 4
    beta: Positive = 0.1


class KtoConfig(MethodConfig):
    threshold: Number = 0.0
    up_weight: Positive = 1.0
    down_weight: Positive = 1.0
    beta: Positive = 0.1


class TuneConfig(FeatureSection):
    name = "tune"
    moved = {"trainer.sft": "tune.sft", "trainer.dpo": "tune.dpo", "trainer.kto": "tune.kto"}

    sft: SftConfig = SftConfig()
    dpo: DpoConfig = DpoConfig()
    kto: KtoConfig = KtoConfig()
