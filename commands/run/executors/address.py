"""The proxy's address as agents on other machines reach it."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

ADDRESSES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "LIGHTNING_URL", "AGL_OPENAI_BASE_URL", "AGL_EVENT_URL")


def reached_at(proxy_url: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with another root in the proxy's addresses. None: as they are."""
    if proxy_url is None:
        return dict(env)
    root = proxy_url.rstrip("/")
    return {name: root + urlsplit(value).path if name in ADDRESSES else value for name, value in env.items()}
