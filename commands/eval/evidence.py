"""Tests whether tasks show a drop, or exclude one of more than the margin. Plain data, and a line of text.

The same statistics decide whether a new version goes live (proxy/promotion).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.statistics import Evidence, difference

MARGIN, LEVEL = 0.1, 0.05

Rewards = Mapping[str, Sequence[float]]  # by task


def weigh(rewards: Rewards, first: Rewards) -> dict[str, Any]:
    """Weigh a row against the first one; both have the same tasks.

    `margin`: a tenth of the rewards' range, which is 0 to 1, or wider if rewards are. `shown`: there is a drop, with an
    e-value of at least `needed`. `excluded`: there is none of more than `margin`.
    """
    seen = [reward for rows in (rewards, first) for task in rows.values() for reward in task]
    low, high = min(0.0, *seen), max(1.0, *seen)
    evidence, needed = Evidence(MARGIN, LEVEL), 1 / LEVEL
    evidence.extend(difference(rewards[task], first[task], low, high) for task in rewards)
    return {
        "margin": MARGIN * high - MARGIN * low,
        "e_drop": evidence.e_drop,
        "e_safe": evidence.e_safe,
        "needed": needed,
        "shown": evidence.e_drop >= needed,
        "excluded": evidence.e_safe >= needed,
    }


def same_version(row: Mapping[str, Any], first: Mapping[str, Any]) -> int | None:
    """Return the policy version that answered in both rows, beside the same other models; None if there is no such."""
    ours = [version for version in row["policy_versions"] if version is not None]
    return ours[0] if len(ours) == 1 and row["policy_versions"] == first["policy_versions"] else None


def comparison_line(row: Mapping[str, Any], first: str) -> str:
    """Return a row's comparison with the first one in one line."""
    versus, beside = row["versus"], f"{row['model']} beside {first}"
    if (version := versus["same_version"]) is not None:
        return f"{beside}: both are policy version {version}, so any difference is chance"
    found = versus["evidence"]
    margin, excluded = f"{found['margin']:g}", found["excluded"]
    if found["shown"]:
        return f"{beside}: a drop is shown" + (f", and one of more than {margin} is excluded" if excluded else "")
    if excluded:
        return f"{beside}: a drop of more than {margin} is excluded"
    return (
        f"{beside}: a drop of more than {margin} is not excluded yet (evidence {found['e_safe']:.2g}, "
        f"{found['needed']:g} are needed)"
    )
