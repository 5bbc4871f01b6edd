"""The section `trainer.judge`: the model that scores calls."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ..config.section import Number, Seconds, Section
from ..config.trainer import TrainerConfig


class JudgeConfig(Section):
    model: str | None = None
    api_base: str | None = None
    weight: Number = 1.0
    concurrency: Annotated[int, Field(ge=1)] = 8
    timeout_s: Seconds = 60.0


class JudgeKeys(TrainerConfig):
    names = {"credit": ("judge",)}

    judge: JudgeConfig = JudgeConfig()

    @property
    def judged(self) -> bool:
        """Return whether a judge scores any calls."""
        return "judge" in ([self.credit] if isinstance(self.credit, str) else self.credit.values())

    @model_validator(mode="after")
    def _has_a_judge(self) -> JudgeKeys:
        if self.judged and self.judge.model is None:
            raise ValueError("credit judge needs judge.model, as litellm names it (openai/gpt-4o-mini)")
        return self

    @property
    def training_weights(self) -> dict[str, float]:
        """Return those of the return that is shown, and the judge's."""
        own = {"judge": self.judge.weight} if self.judged else {}
        return {**super().training_weights, **own}
