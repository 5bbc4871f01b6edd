"""Tells whether one version's weights go on from another's. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from ...proxy.store.resources.promotions import Promotion
from ...proxy.types import PolicyVersion


def goes_on(version: int, live: int, parents: Mapping[int, int], broken: Set[int]) -> bool:
    """Return whether `version` was trained on from `live` by way of versions that are not `broken`, itself included.

    `parents`: by version, the one that its step started from. A version goes on from itself.
    """
    while version != live:
        if version in broken or version not in parents:
            return False
        version = parents[version]
    return True


def broken(versions: Iterable[PolicyVersion], live: PolicyVersion, test: Promotion | None) -> set[int]:
    """Return the versions that nothing is trained on from: taken back, or older than a choice by hand.

    `test`: the last one of the live version. If that made it live, versions may have gone on from it before.
    """
    by_gate = test is not None and test.status == "promoted" and test.decided_at == live.live_at
    since = 0.0 if by_gate or live.live_at is None else live.live_at
    return {v.version for v in versions if v.status in ("rejected", "failed") or v.created_at < since}
