"""The fields that rewarders add to answers of the core's routes."""

from __future__ import annotations

from pydantic import BaseModel

from ...proxy.api.answers import Policy, Status


class PolicyWithRewarders(Policy):
    """`warnings`: what to know of rewarders that train, and that nobody has found to agree with people."""

    warnings: list[str]


class Spent(BaseModel):
    name: str
    tokens: int
    usd: float


class StatusWithRewarders(Status):
    """`spent`: what the models of each rewarder have used and cost so far."""

    spent: list[Spent]
