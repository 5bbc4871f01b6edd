"""Protects the operator routes of the vLLM that we start: they require the operator's key.

A caller of these routes can replace the weights and write files, and web pages open on this machine could reach them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hmac import compare_digest, digest
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import ConfigError, Forbidden, InvalidRequest, LightningError, Unauthorized
from ..core.http import foreign

KEY_HEADER = "x-lightning-operator-key"
RELAY_HEADER = "x-lightning-relay-key"
KEY_FILE_VARIABLE = "LIGHTNING_OPERATOR_KEY_FILE"
GUARD = f"{__name__}.OperatorGuard"  # as vLLM's option names it

# Endpoints by their path in vLLM's own table of routes: those below /v1 that are the operator's, and those elsewhere
# that anybody on this machine may read.
_CLOSED = frozenset({"load_lora_adapter", "unload_lora_adapter"})
_READABLE = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def key_file(directory: Path) -> Path:
    """Return the file with the operator's key for the vLLM that serves the weights in `directory`."""
    return directory / "operator.key"


def operator_headers(directory: Path) -> dict[str, str]:
    """Return the header that opens operator routes, making its key if needed. Raises ConfigError if that fails."""
    path = key_file(directory)
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        if not path.exists():
            directory.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32))
            with suppress(FileExistsError):  # another process has made it meanwhile
                os.link(new, path)
            new.unlink()
        return {KEY_HEADER: path.read_text().strip()}
    except OSError as error:
        raise ConfigError(f"policy.directory: {path} cannot be used: {error.strerror}") from None


def relay_headers(directory: Path) -> dict[str, str]:
    """Return the header by which the proxy vouches for an agent's request; it opens no operator route."""
    return {RELAY_HEADER: _relay_key(operator_headers(directory)[KEY_HEADER].encode()).decode()}


def _relay_key(key: bytes) -> bytes:
    return digest(key, b"relay", "sha256").hex().encode()


class OperatorGuard:
    """ASGI middleware around vLLM. It lets every request with the operator's key pass.

    Other requests may use the agents' routes and read the server's state, but must not come from a foreign web page,
    unless the proxy vouches for them. The endpoint that vLLM's router matches decides what a request may do.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._key = Path(os.environ[KEY_FILE_VARIABLE]).read_text().strip().encode()
        self._relay_key = _relay_key(self._key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "forbidden"})
        else:
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> LightningError | None:
        def has(wanted: str, key: bytes) -> bool:
            return any(name == wanted.encode() and compare_digest(value, key) for name, value in scope["headers"])

        if has(KEY_HEADER, self._key):
            return None
        if (header := foreign(scope["headers"])) is not None and not has(RELAY_HEADER, self._relay_key):
            return Forbidden(f"this vLLM answers only its proxy and programs on this machine, not {header}")
        if _CONTROL.search(scope["path"]):
            return InvalidRequest("the path has control characters")
        if not _is_open(scope):
            return Unauthorized(f"{scope['path']} is for the operator: it needs the header {KEY_HEADER}")
        return None


def _is_open(scope: Scope) -> bool:
    """Return whether all endpoints at the request's path are open to callers without the operator's key."""
    matched = [route for route in _leaves(scope["app"].routes) if route.matches(scope)[0] is not Match.NONE]
    for route in matched:
        path = getattr(route, "path", "")
        if path in _READABLE:
            is_open = scope.get("method", "GET") in ("GET", "HEAD")
        else:  # a route without an endpoint of its own is another app, of which nothing is known
            is_endpoint = getattr(route, "endpoint", None) is not None
            is_open = is_endpoint and path.startswith("/v1/") and _CLOSED.isdisjoint(path.split("/"))
        if not is_open:
            return False
    return bool(matched) or str(scope["path"]).startswith("/v1/")  # to what matches nothing vLLM answers 404


def _leaves(routes: Iterable[BaseRoute]) -> Iterator[Any]:
    """Yield every route. From 0.137 on, FastAPI nests the routes of included routers."""
    for route in routes:
        contexts = getattr(route, "effective_route_contexts", None)
        if contexts is None:
            yield route
        else:
            yield from (context.starlette_route or context for context in contexts())
