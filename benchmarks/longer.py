"""A reward that pays for length alone (`rewards.function`), so that a policy learns to game it."""

from __future__ import annotations

from typing import Any

ENOUGH = 60  # characters


def longer(rollout: dict[str, Any]) -> float | None:
    """Return how long the last answer is, from 0 to 1."""
    if not rollout["calls"]:
        return None
    said = rollout["calls"][-1]["response"]["choices"][0]["message"]["content"] or ""
    return min(1.0, len(said) / ENOUGH)
