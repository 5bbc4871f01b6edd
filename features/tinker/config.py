"""The section `tinker`: a service that takes the training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import SecretStr, field_validator

from ...core.config.section import FeatureSection, Seconds, check_key, check_url

TinkerLoss = Literal["importance_sampling", "ppo", "cispo"]
# The service's loss for each of ours that it has a term for. They differ in the weights of tokens, which we send.
LOSSES: Mapping[str, TinkerLoss] = {"cispo": "cispo", "grpo": "ppo", "dapo": "ppo", "bnpo": "ppo", "dr_grpo": "ppo"}


class TinkerConfig(FeatureSection):
    name = "tinker"
    moved = {"trainer.backend": "tinker.enabled", "trainer.tinker": "tinker"}

    enabled: bool = False
    base_url: str | None = None
    api_key: SecretStr | None = None
    base_model: str | None = None
    loss: Literal["auto"] | TinkerLoss = "auto"
    reduction: Literal["sum", "mean"] = "sum"
    timeout_s: Seconds = 900.0

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None:
            check_url("base_url", url, is_vllm=False)
        return url

    @field_validator("api_key")
    @classmethod
    def _is_sendable(cls, key: SecretStr | None) -> SecretStr | None:
        check_key("it", key)
        return key

    @property
    def trains_here(self) -> bool:
        return not self.enabled
