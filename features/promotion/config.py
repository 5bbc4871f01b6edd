"""The section `promotion`: whether and how a new version is tested before it goes live (docs/training.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ...core.config.root import Config
from ...core.config.section import FeatureSection, Number, Seconds

Share = Annotated[float, Field(gt=0, lt=1)]

# Metrics that need no reward, and their range (None: only the order of two values counts). Of each, lower is better.
NO_REWARDS: Mapping[str, tuple[float, float] | None] = {
    "tool_errors": (0.0, 1.0),  # the share of tool calls that failed
    "truncated": (0.0, 1.0),  # the share of answers that were cut off
    "unrewarded": (0.0, 1.0),  # the share of rollouts without a reward
    "answer_tokens": None,  # on average over the rollout's calls
    "latency": None,  # milliseconds until an answer was complete, as above
}

ONE_SERVER = (
    "promotion.mode gated needs a second server where weights are published merged: one server has one version. "
    "Give the policy's upstream `replicas`, or set policy.publish to lora"
)


class PromotionConfig(FeatureSection):
    name = "promotion"
    moved = {
        "policy.promotion": "promotion.mode",
        "policy.gate": "promotion",
        "trainer.promote_every": "promotion.every_steps",
    }

    mode: Literal["immediate", "gated"] = "immediate"
    every_steps: Annotated[int, Field(ge=1)] = 1
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.5
    metrics: Annotated[dict[str, Share], Field(min_length=1)] = {"reward": 0.1}
    reward_range: tuple[Number, Number] = (0.0, 1.0)
    reward_ranges: dict[str, tuple[Number, Number]] = {}
    level: Share = 0.05
    max_rollouts: Annotated[int, Field(ge=2)] = 2000
    reward_timeout_s: Seconds = 1800.0

    @property
    def is_gated(self) -> bool:
        """Return whether a version that is to go live is tested first."""
        return self.mode == "gated"

    @model_validator(mode="after")
    def _has_a_range(self) -> PromotionConfig:
        for name, (low, high) in {"": self.reward_range, **self.reward_ranges}.items():
            if not low < high:
                key = f"reward_ranges: {name}" if name else "reward_range"
                raise ValueError(f"{key} is the lowest and the highest reward, got [{low:g}, {high:g}]")
        if others := self.reward_ranges.keys() - (self.metrics.keys() - NO_REWARDS.keys()):
            raise ValueError(f"reward_ranges: {min(others)} is no reward in metrics")
        if self.every_steps > 1 and not self.is_gated:
            raise ValueError("every_steps is how many steps come to one test: set promotion.mode to gated")
        return self

    def check(self, config: Config) -> None:
        if self.is_gated and not config.policy.pin_rollouts:
            raise ValueError("promotion.mode gated compares entire rollouts: it needs policy.pin_rollouts true")
        obstacle = self.merged_obstacle(config)
        if obstacle and (config.policy.publish == "merged" or config.trainer.weights == "full"):
            raise ValueError(obstacle)

    def merged_obstacle(self, config: Config) -> str | None:
        """Merged weights are one version for each server, and we choose the server that answers."""
        upstream = config.policy_upstream
        has_another = upstream is None or not self.is_gated or len(upstream.urls) > 1
        return None if has_another else ONE_SERVER
