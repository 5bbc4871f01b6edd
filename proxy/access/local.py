"""Tells requests of this machine's programs from those that a web page elsewhere could send."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from ..errors import Forbidden


def require_local(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse what a web page could send, where no key is needed: a foreign Origin, or a foreign host name.

    Raises Forbidden. https://owasp.org/www-community/attacks/DNS_Rebinding
    """
    if (header := foreign(headers)) is not None:
        raise Forbidden(
            f"without keys only this machine is served, not {header}: make a key with "
            "`lightning-proxy keys create NAME`, or configure proxy.api_keys"
        )


def foreign(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the Host or Origin header that names another machine, for people to read; None without one."""
    for name, value in headers:
        text = value.decode("latin-1")
        if name not in (b"host", b"origin") or (name == b"origin" and _is_app(text)):
            continue
        if not _is_loopback(text):
            return f"{name.decode()} {text[:100]!r}"
    return None


def _is_app(origin: str) -> bool:
    """Whether an Origin is a desktop program's (vscode-file://…), which no web page can have."""
    return "://" in origin and not origin.lower().startswith(("http://", "https://"))


@lru_cache(1024)
def _is_loopback(authority: str) -> bool:
    """Whether a Host header, or an Origin's URL, names the loopback interface, and nothing besides a port."""
    try:
        parts = urlsplit(authority if "://" in authority else f"//{authority}")
        host = parts.hostname
        if parts.username is not None or parts.path or parts.query or parts.fragment or "\\" in authority:
            return False
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False
