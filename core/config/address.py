"""Removes secrets or entire addresses from texts, and finds the secrets in an address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus, urlsplit

SECRET_NAME = re.compile(
    r"key|token|secret|passw|pwd|auth|credential|sig$|signature|^(?:code|sas|pass)$", re.IGNORECASE
)
_PARTS = re.compile(r"([a-z][a-z0-9+.-]*://|//)?([^/?#]*)([^?#]*)", re.IGNORECASE)
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[]*)(:\d*)?\W*")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
# Also as asyncio, aiohttp and httpx write them: ('127.0.0.1', 80), `host name:80`, an IP address.
_ANY_ADDRESS = re.compile(
    rf"{_ADDRESS.pattern}|\('[^']+', \d+(?:, \d+, \d+)?\)|(?<=host )[^\s:]+:\d+|(?:\d{{1,3}}\.){{3}}\d{{1,3}}(?::\d+)?"
    r"|\[[0-9a-f]*:[0-9a-f:.]+\](?::\d+)?|(?:localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+):\d{2,5}\b",
    re.IGNORECASE,
)


def shown(url: str) -> str:
    """Return an address without user, password, query and fragment."""
    scheme, authority, path = _PARTS.match(url).groups("")  # type: ignore[union-attr]  # it matches every text
    host = authority.rpartition("@")[2]
    return scheme + (host + path if _HOST.fullmatch(host) else "…")  # a "/" or "?" in a password ends its authority


def without_secrets(text: str) -> str:
    """Return a text, such as a library's error, with `shown` applied to every address in it."""
    return _ADDRESS.sub(lambda found: shown(found[0]), text)


def without_addresses(text: str) -> str:
    """Return a text, such as a library's error, without any server address."""
    return _ANY_ADDRESS.sub("…", text)


def secrets_in(url: str) -> Iterator[str]:
    """Yield the secrets in an address, both as written and decoded.

    These are its user and password, and query values with secret-sounding names.
    """
    try:
        parts = urlsplit(url)
        held = [parts.username, parts.password]
    except ValueError:
        return
    for pair in parts.query.split("&"):
        name, _, value = pair.partition("=")
        if SECRET_NAME.search(unquote(name)):
            held.append(value)
    for secret in filter(None, held):
        yield from {secret, unquote(secret), unquote_plus(secret)}
