"""No test of `make test` reaches another machine: who tries is told of by name."""

from __future__ import annotations

import sys
from ipaddress import ip_address
from typing import Any

# RFC 2606 and RFC 5737: never anybody's, so that a test may ask for them and find nothing.
NOBODY = (".invalid", ".test", ".example", "192.0.2.")
_watched: list[list[str]] = []


class Elsewhere(Exception):
    """An address that is not this machine's."""


def watch(addresses: list[str] | None) -> None:
    """From now on refuse what is not of this machine, and note it in `addresses`; None: refuse nothing."""
    _watched[:] = [] if addresses is None else [addresses]


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or event not in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        return
    host = arguments[1] if event != "socket.getaddrinfo" else arguments
    host = host[0] if isinstance(host, tuple) else None  # the address of a local socket is a path
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host is not None and not _is_here(host):
        _watched[0].append(f"{event} {host}")
        raise Elsewhere(f"{host} is not this machine: no test of `make test` needs the network")


def _is_here(host: str) -> bool:
    if host in ("", "localhost") or any(part in host for part in NOBODY):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


sys.addaudithook(_on_event)
