"""The proxy's address as agents on other machines reach it."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

SCHEMES = ("http://", "https://")


def reached_at(proxy_url: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with another root in the proxy's addresses. None: as they are."""
    if proxy_url is None:
        return dict(env)
    root = proxy_url.rstrip("/")
    return {name: root + urlsplit(value).path if value.startswith(SCHEMES) else value for name, value in env.items()}
