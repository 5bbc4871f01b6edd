"""Decides whether one version's weights were trained on from another's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.records import PolicyVersion
from ...store.versions import Ancestor
from .tests import Promotion

TAKEN_BACK = ("rejected", "failed")


def builds_on(line: Sequence[Ancestor], live: int, since: float) -> bool:
    """Return whether a version was trained on from `live`, with no version between that was taken back or is too old.

    `line`: the version and those that it was trained on from, newest first.
    """
    later = [one for one in line if one.version != live]
    return len(later) < len(line) and all(one.status not in TAKEN_BACK and one.created_at >= since for one in later)


def chosen_at(live: PolicyVersion, test: Promotion | None) -> float:
    """Return when the live version was chosen by hand (Unix time); nothing is trained on from versions made before.

    0 if it was not. `test`: its last one. If that made it live, versions may have been trained on from it before.
    """
    by_gate = test is not None and test.status == "promoted" and test.decided_at == live.live_at
    return 0.0 if by_gate or live.live_at is None else live.live_at
