"""The section `tune`: fine-tuning by imitation, and by preferences."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...core.config.section import FeatureSection, Number, Positive, Section


class SftConfig(Section):
    min_reward: Number | None = None
    top: Annotated[int, Field(ge=1)] = 4
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Positive = 2e-4
    batch_tokens: Annotated[int, Field(ge=1)] = 2048
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1


class DpoConfig(Section):
    margin: Positive = 0.1
    pairs_per_task: Annotated[int, Field(ge=1)] = 4
    beta: Positive = 0.1
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Positive = 5e-5
    batch_tokens: Annotated[int, Field(ge=1)] = 8192
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1


class KtoConfig(Section):
    threshold: Number = 0.0
    up_weight: Positive = 1.0
    down_weight: Positive = 1.0
    beta: Positive = 0.1
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Positive = 5e-5
    batch_tokens: Annotated[int, Field(ge=1)] = 1024
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1


class TuneConfig(FeatureSection):
    name = "tune"
    moved = {"trainer.sft": "tune.sft", "trainer.dpo": "tune.dpo", "trainer.kto": "tune.kto"}

    sft: SftConfig = SftConfig()
    dpo: DpoConfig = DpoConfig()
    kto: KtoConfig = KtoConfig()
