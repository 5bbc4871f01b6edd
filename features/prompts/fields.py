"""Fields that prompts add to what the core's routes of rollouts take and show."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...proxy.api.answers import RolloutDetail
from ...proxy.api.bodies import INTEGER, Id, RolloutsBody
from .table import Placed

Version = Annotated[int, Field(strict=True, ge=1, lt=2**31), INTEGER]


class RolloutsWithPrompts(RolloutsBody):
    """`prompts`: versions of prompts by name, if not the live ones."""

    prompts: Annotated[
        dict[Id, Version],
        Field(json_schema_extra={"additionalProperties": False}),  # beside the pattern of its names
    ] = {}


class RolloutWithPrompts(RolloutDetail):
    """`prompts`: what the model was shown in place of texts that the agent sent."""

    prompts: list[Placed]
