"""Fields that the tests of versions add to answers of the core's routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...proxy.api.answers import Policy, VersionSeen
from .tests import Promotion


class PolicyWithTest(Policy):
    """`promotion`: whether new versions are tested before they go live. `test`: the one that is under way.

    `waiting`: the version that is tested next.
    """

    promotion: Literal["immediate", "gated"]
    test: Promotion | None
    waiting: int | None


@dataclass(frozen=True, kw_only=True)
class VersionWithTest(VersionSeen):
    """A version. `promotion`: its last test against a live version, with the numbers; null without one."""

    promotion: Promotion | None
