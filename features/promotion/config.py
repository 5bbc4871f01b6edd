"""The section `promotion`: whether and how a new version is tested before it goes live (docs/training.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ...core.config.root import Config
from ...core.config.section import FeatureSection, Number

Share = Annotated[float, Field(gt=0, lt=1)]
ONE_SERVER = (
    "promotion.mode gated needs a second server if weights are published merged: a server serves one version. "
    "Give the policy's upstream `replicas`, or set policy.publish to lora"
)


class PromotionConfig(FeatureSection):
    name = "promotion"
    moved = {"policy.promotion": "promotion.mode", "policy.gate": "promotion"}

    mode: Literal["immediate", "gated"] = "immediate"
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.5
    metrics: Annotated[dict[str, Share], Field(min_length=1)] = {"reward": 0.1}
    reward_range: tuple[Number, Number] = (0.0, 1.0)
    max_rollouts: Annotated[int, Field(ge=2)] = 2000

    @property
    def is_gated(self) -> bool:
        return self.mode == "gated"

    def faults(self) -> Iterator[str]:
        low, high = self.reward_range
        if not low < high:
            yield f"reward_range must be the lowest and the highest reward, in this order; got [{low:g}, {high:g}]"

    def check(self, config: Config) -> None:
        if self.is_gated and not config.policy.pin_rollouts:
            raise ValueError("promotion.mode gated compares entire rollouts: it needs policy.pin_rollouts: true")
        obstacle = self.merged_obstacle(config)
        if obstacle and (config.policy.publish == "merged" or config.trainer.weights == "full"):
            raise ValueError(obstacle)

    def merged_obstacle(self, config: Config) -> str | None:
        """Return why merged weights cannot be published in this mode; None if they can."""
        upstream = config.policy_upstream
        has_another = upstream is None or not self.is_gated or len(upstream.urls) > 1
        return None if has_another else ONE_SERVER
