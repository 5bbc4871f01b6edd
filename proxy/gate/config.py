"""The keys of tests of new versions: those of the policy (`policy.gate`), and of prompts (`prompts.gate`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..config.section import Number, Seconds, Section

Share = Annotated[float, Field(gt=0, lt=1)]

NO_REWARDS = frozenset({"tool_errors", "truncated", "unrewarded", "answer_tokens", "latency"})  # metrics.py has them


class GateConfig(Section):
    """How a new version is tested before it goes live (docs/promotion.md)."""

    share: Annotated[float, Field(gt=0, le=0.5)] = 0.5
    metrics: Annotated[dict[str, Share], Field(min_length=1)] = {"reward": 0.1}
    reward_range: tuple[Number, Number] = (0.0, 1.0)
    reward_ranges: dict[str, tuple[Number, Number]] = {}
    level: Share = 0.05
    max_rollouts: Annotated[int, Field(ge=2)] = 2000
    reward_timeout_s: Seconds = 1800.0

    @model_validator(mode="after")
    def _has_a_range(self) -> GateConfig:
        for name, (low, high) in {"": self.reward_range, **self.reward_ranges}.items():
            if not low < high:
                key = f"reward_ranges: {name}" if name else "reward_range"
                raise ValueError(f"{key} is the lowest and the highest reward, got [{low:g}, {high:g}]")
        if others := self.reward_ranges.keys() - (self.metrics.keys() - NO_REWARDS):
            raise ValueError(f"reward_ranges: {min(others)} is no reward in metrics")
        return self


class Gated(Section):
    """A section whose versions may have a gate."""

    promotion: Literal["immediate", "gated"] = "immediate"
    gate: GateConfig = GateConfig()

    @property
    def is_gated(self) -> bool:
        """Return whether a version that is to go live is tested first."""
        return self.promotion == "gated"
