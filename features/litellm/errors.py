"""Turns litellm's exceptions into answers and errors of ours, without any secret or address that they quote."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ...core.config.address import without_addresses
from ...core.errors import LightningError, Unsupported, UpstreamTimeout, UpstreamUnreachable
from ...core.records import Header
from ...proxy.gateway.upstream import NoConnection

# Of aiohttp and httpx; matched by name, so that neither is imported here.
_NO_CONNECTION = frozenset({"ClientConnectorError", "ClientConnectorDNSError", "ConnectError", "ConnectTimeout"})
_KEPT = ("retry-after", "request-id", "x-request-id")
_SECRET_NAME = re.compile(r"(?i)key|token|secret|password|credential")
_SHORTEST_SECRET = 8
_LONGEST_MESSAGE = 2000
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip


class ProviderError(LightningError):
    """The error answer of the provider, or of litellm in its place."""

    def __init__(self, message: str, status: int, headers: list[Header]) -> None:
        super().__init__(message)
        self.status = status
        self.type = _TYPES.get(status, "upstream_error")
        self.headers = tuple(headers)


def translated(error: Exception, upstream: str, secrets: Iterable[str]) -> LightningError:
    """Return the error to show: ProviderError if the provider answered, else the reason why it did not."""
    text = str(error).partition("\nTraceback (most recent call last)")[0]
    message = redacted(text, secrets)[:_LONGEST_MESSAGE]
    chain = list(_chain(error))
    if isinstance(error, ImportError):
        return Unsupported(
            f"upstream {upstream}: litellm cannot do this without further packages ({message}); "
            "docs/providers.md says what to do instead"
        )
    names = {type(e).__name__ for e in chain}
    if names & _NO_CONNECTION:
        return NoConnection(f"upstream {upstream} cannot be reached through litellm: {message}")
    if "Timeout" in names:
        return UpstreamTimeout(f"upstream {upstream}: litellm waited too long: {message}")
    status = _provider_status(chain)
    if status is None and "APIConnectionError" in names:
        return UpstreamUnreachable(f"upstream {upstream} broke off: {message}")
    return ProviderError(message, status or _own_status(error), _headers(chain))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return the text without these secrets, values of secret environment variables, and addresses."""
    known = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    for secret in sorted({*secrets, *known}, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "[redacted]")
    return without_addresses(text)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _provider_status(chain: Iterable[BaseException]) -> int | None:
    """The status that the provider answered: litellm changes some, but keeps the error that it began with."""
    others = [e for e in chain if not type(e).__module__.startswith("litellm.exceptions")]
    found = [status for e in others if isinstance(status := getattr(e, "status_code", None), int)]
    return next((status for status in reversed(found) if 400 <= status < 600), None)


def _own_status(error: Any) -> int:
    """The status of a refusal that is litellm's own."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) and 400 <= status < 600 else 502


def _headers(chain: Iterable[Any]) -> list[Header]:
    for error in chain:
        headers = getattr(error, "litellm_response_headers", None) or getattr(error, "headers", None) or {}
        if kept := [(name.encode(), str(headers[name]).encode()) for name in _KEPT if name in headers]:
            return kept
    return []
