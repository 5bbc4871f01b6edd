"""The section `teacher`: a model that scores the policy's tokens for training."""

from __future__ import annotations

from pydantic import SecretStr, model_validator

from ...core.config.root import Config
from ...core.config.section import FeatureSection, Positive, check_key, check_url


class TeacherConfig(FeatureSection):
    name = "teacher"
    moved = {"trainer.teacher": "teacher"}

    base_url: str | None = None
    model: str | None = None
    api_key: SecretStr | None = None
    weight: Positive = 1.0

    @model_validator(mode="after")
    def _check_access(self) -> TeacherConfig:
        if self.base_url is not None:
            check_url("base_url", self.base_url, is_vllm=True)
        elif self.model is not None or self.api_key is not None:
            raise ValueError("a teacher needs a base_url, such as http://127.0.0.1:8200/v1")
        check_key("api_key", self.api_key)
        return self

    @property
    def credentials(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key.get_secret_value()}"}

    @property
    def has_guide(self) -> bool:
        return self.base_url is not None

    def check(self, config: Config) -> None:
        trainer = config.trainer
        if self.has_guide and trainer.importance_level == "sequence" and trainer.loss_type != "cispo":
            raise ValueError(
                "a teacher scores single tokens, but with trainer.importance_level sequence, "
                f"trainer.loss_type {trainer.loss_type} treats all tokens of an answer alike: set importance_level "
                "to token, or loss_type to cispo"
            )
