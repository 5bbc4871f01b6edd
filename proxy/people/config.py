"""The key `rewards.origins`: the web applications whose users may reward answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ..config.rollouts import RewardsConfig

Origin = Annotated[str, Field(pattern=r"^https?://[^/\s]+$")]


class PeopleKeys(RewardsConfig):
    origins: list[Origin] = []

    @model_validator(mode="after")
    def _takes_thumbs(self) -> PeopleKeys:
        if self.origins and (self.range[0] > -1 or self.range[1] < 1):
            raise ValueError("origins: rewards.range must hold a thumb, which is -1 or 1")
        return self
