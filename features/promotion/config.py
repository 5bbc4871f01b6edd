"""Keys of `policy` and `trainer`: whether and how new weights are tested before they go live."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ...core.config.core import CoreConfig
from ...core.config.policy import PolicyConfig
from ...core.config.section import Number, Seconds, Section
from ...core.config.trainer import TrainerConfig

Share = Annotated[float, Field(gt=0, lt=1)]

NO_REWARDS = frozenset({"tool_errors", "truncated", "unrewarded", "answer_tokens", "latency"})  # metrics.py has them

ONE_SERVER = (
    "policy.promotion gated needs a second server where weights are published merged: one server has one version. "
    "Give the policy's upstream `replicas`, or set policy.publish to lora"
)


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


class GateKeys(PolicyConfig):
    promotion: Literal["immediate", "gated"] = "immediate"
    gate: GateConfig = GateConfig()

    @property
    def is_gated(self) -> bool:
        """Return whether a version that is to go live is tested first."""
        return self.promotion == "gated"

    @model_validator(mode="after")
    def _keeps_a_rollout_on_its_version(self) -> GateKeys:
        if self.is_gated and not self.pin_rollouts:
            raise ValueError("policy.promotion gated compares entire rollouts: it needs policy.pin_rollouts true")
        return self


class PromotionKeys(TrainerConfig):
    promote_every: Annotated[int, Field(ge=1)] = 1


class PromotionChecks(CoreConfig):
    """Merged weights are one version for each server, and we choose the server that answers."""

    @property
    def merged_obstacle(self) -> str | None:
        upstream = self.policy_upstream
        has_another = upstream is None or not GateKeys.of(self.policy).is_gated or len(upstream.urls) > 1
        return None if has_another else ONE_SERVER

    @model_validator(mode="after")
    def _can_test_a_version_beside_the_live_one(self) -> PromotionChecks:
        if PromotionKeys.of(self.trainer).promote_every > 1 and not GateKeys.of(self.policy).is_gated:
            raise ValueError("trainer.promote_every is how many steps come to one test: set policy.promotion to gated")
        if self.merged_obstacle and (self.policy.publish == "merged" or self.trainer.weights == "full"):
            raise ValueError(self.merged_obstacle)
        return self
