"""Fields that contexts add to the calls of a rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ...proxy.api.answers import Call, Status


class Context(BaseModel):
    edge: Literal["continues", "edits", "compacts", "delegates", "returns", "retries"]
    call_id: str


class CallWithContexts(Call):
    """`contexts`: where the call's context comes from. `rejected`: another attempt was used in place of its answer."""

    contexts: list[Context]
    rejected: bool


class StatusWithContexts(Status):
    """`contexts`: edges by kind in the newest 20 rollouts that have ended, `new` contexts and `rejected` attempts."""

    contexts: dict[str, int]
