"""Keys of `policy` and `trainer`: whether and how new weights are tested before they go live."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ..config.core import CoreConfig
from ..config.policy import PolicyConfig
from ..config.trainer import TrainerConfig
from ..gate.config import Gated

ONE_SERVER = (
    "policy.promotion gated needs a second server where weights are published merged: one server has one version. "
    "Give the policy's upstream `replicas`, or set policy.publish to lora"
)


class GateKeys(Gated, PolicyConfig):
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
