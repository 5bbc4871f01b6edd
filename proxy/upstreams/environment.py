"""Finds the HTTP proxy that the environment names for an upstream's server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL

from ..config.upstreams import UpstreamConfig


def through(upstream: UpstreamConfig, url: str) -> Mapping[str, Any]:
    """Return aiohttp's arguments for a request to this server: the environment's proxy with `trust_env`, else none.

    A session's own trust_env would also look for passwords in ~/.netrc.
    """
    return _through(url) if upstream.trust_env else {}


@lru_cache(256)
def _through(url: str) -> Mapping[str, Any]:
    try:
        proxy, auth = get_env_proxy_for_url(URL(url))
    except LookupError:
        return {}
    return {"proxy": proxy if auth is None else proxy.with_user(auth.login).with_password(auth.password)}
