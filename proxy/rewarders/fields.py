"""The field that rewarders add to answers of the core's routes."""

from __future__ import annotations

from ..control.answers import Policy


class PolicyWithRewarders(Policy):
    """`warnings`: what to know of rewarders that train, and that nobody has found to agree with people."""

    warnings: list[str]
