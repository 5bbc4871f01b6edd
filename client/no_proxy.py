"""Keeps traffic to the proxy away from the HTTP proxy that the environment may name. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

NAMES = ("NO_PROXY", "no_proxy")  # some programs read the one, some the other
ADDRESSES = ("LIGHTNING_URL", "OPENAI_BASE_URL")


def reached_directly(env: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return a program's variables with the hosts of the proxy's addresses in NO_PROXY, beside those that are there."""
    hosts = {one: None for name in ADDRESSES if name in env for one in _spellings(urlsplit(env[name]).hostname or "")}
    return {**env, **{name: _with(there.get(name) or there.get(other, ""), hosts) for name, other in _PAIRS}}


_PAIRS = (NAMES, NAMES[::-1])


def _with(listed: str, hosts: Mapping[str, None]) -> str:
    kept = [one.strip() for one in listed.split(",") if one.strip()]
    return listed if "*" in kept else ",".join([*kept, *(host for host in hosts if host not in kept)])


def _spellings(host: str) -> list[str]:
    """An address of IPv6 stands with and without brackets: programs differ in what they look for."""
    return [host, f"[{host}]"] if ":" in host else [host] if host else []
