"""The section `trainer.sft`: imitation of the best rollouts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..config.section import Number, Positive, Section
from ..config.trainer import TrainerConfig


class SftConfig(Section):
    min_reward: Number | None = None
    top: Annotated[int, Field(ge=1)] = 4
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Positive = 2e-4
    batch_tokens: Annotated[int, Field(ge=1)] = 2048
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1


class SftKeys(TrainerConfig):
    sft: SftConfig = SftConfig()
