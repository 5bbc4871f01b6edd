"""The section `tinker`: a service that takes the training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import SecretStr, model_validator

from ...core.config.section import FeatureSection, check_key, check_url

# The service's loss for each of ours that it has a term for. They differ in the weights of tokens, which we send.
LOSSES: Mapping[str, str] = {"cispo": "cispo", "grpo": "ppo", "dapo": "ppo", "bnpo": "ppo", "dr_grpo": "ppo"}


class TinkerConfig(FeatureSection):
    name = "tinker"
    moved = {"trainer.backend": "tinker.enabled", "trainer.tinker": "tinker"}

    enabled: bool = False
    base_url: str | None = None
    api_key: SecretStr | None = None
    base_model: str | None = None
    reduction: Literal["sum", "mean"] = "sum"

    @model_validator(mode="after")
    def _check_access(self) -> TinkerConfig:
        if self.base_url is not None:
            check_url("base_url", self.base_url, is_vllm=False)
        check_key("api_key", self.api_key)
        return self

    @property
    def trains_here(self) -> bool:
        return not self.enabled
