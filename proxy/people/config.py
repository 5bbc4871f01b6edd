"""The key `rewards.origins`: the web applications whose users may reward answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..config.rollouts import RewardsConfig

Origin = Annotated[str, Field(pattern=r"^https?://[^/\s]+$")]


class PeopleKeys(RewardsConfig):
    origins: list[Origin] = []
