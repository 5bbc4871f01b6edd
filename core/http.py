"""Helpers for all HTTP requests: proxies, errors, local addresses, large bodies. Opens no connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL

from .config.address import without_addresses
from .config.upstreams import UpstreamConfig

T = TypeVar("T")

LARGE = 2**17  # bytes of a request: above this, a thread costs less than the wait of other requests


async def in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """Run `work`, in a thread if `size` (in bytes) is large. `work` must not share mutable state."""
    return work() if size < LARGE else await asyncio.to_thread(work)


def through(upstream: UpstreamConfig, url: str) -> Mapping[str, Any]:
    """Return aiohttp's arguments for a request: the environment's proxy if the upstream has `trust_env`, or else {}.

    A session's own trust_env would also look for the server's password in ~/.netrc.
    """
    if not upstream.trust_env:
        return {}
    try:
        proxy, auth = get_env_proxy_for_url(URL(url))
    except LookupError:
        return {}
    return {"proxy": proxy if auth is None else proxy.with_user(auth.login).with_password(auth.password)}


def why_it_failed(error: Exception) -> str:
    """Return why a request failed, in the system's words (Connection refused) or the library's, without addresses."""
    cause: Any = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = getattr(cause, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    said = getattr(cause, "strerror", None) or (cause.message if hasattr(cause, "message") else str(cause))
    return without_addresses(str(said))[:200] or type(cause).__name__


def foreign(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return, for display, the Host or Origin header that names another machine; None if neither does."""
    for name, value in headers:
        if name in (b"host", b"origin"):
            text = value.decode("latin-1")
            # A desktop program's Origin (vscode-file://…) cannot be a web page's.
            is_app = name == b"origin" and "://" in text and not text.lower().startswith(("http://", "https://"))
            if not is_app and not is_loopback(text):
                return f"{name.decode()} {text[:100]!r}"
    return None


@lru_cache(1024)
def is_loopback(authority: str) -> bool:
    """Return whether a Host header, or a URL without a path, names the loopback interface."""
    try:
        parts = urlsplit(authority if "://" in authority else f"//{authority}")
        host = parts.hostname
        if parts.username is not None or parts.path or parts.query or parts.fragment or "\\" in authority:
            return False
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False
