"""Adds the environment variables that agents of Agent Lightning 1.0 read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...commands.api_client import OpenRollout


def variables(proxy_url: str, rollout: OpenRollout) -> dict[str, str]:
    """Return the variables with the model's URL, the URL for events and rewards, and the key."""
    return {
        "AGL_OPENAI_BASE_URL": rollout.base_url,
        "AGL_EVENT_URL": f"{proxy_url}/agl/api/rollouts/{rollout.rollout_id}/attempt/0/events",
        "AGL_KEY": rollout.api_key,
    }
