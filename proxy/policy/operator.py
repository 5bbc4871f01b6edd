"""Closes the operator routes of the vLLM that we start: only who knows the operator's key may use them.

vLLM imports `OperatorGuard` by its option `--middleware`. Whoever may use these routes can replace the weights and
write files, and vLLM asks nobody for a key there: any web page of a browser on this machine could reach them.
"""

from __future__ import annotations

import json
import os
import secrets
from hmac import compare_digest
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from ..access.local import foreign
from ..errors import ConfigError, Forbidden, LightningError, Unauthorized

KEY_HEADER = "x-lightning-operator-key"
KEY_FILE_VARIABLE = "LIGHTNING_OPERATOR_KEY_FILE"
GUARD = f"{__name__}.OperatorGuard"  # as vLLM's option names it

# What anybody on this machine may ask for besides the agents' routes; below /v1, what agents may not.
_READABLE = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
_CLOSED = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


def key_file(directory: Path) -> Path:
    """Return the file with the operator's key of the vLLM that serves what is published in `directory`."""
    return directory / "operator.key"


def operator_headers(directory: Path) -> dict[str, str]:
    """Return the header that opens the operator routes. The key is made at first use, for its owner to read.

    Raises ConfigError if the file can be neither read nor made.
    """
    path = key_file(directory)
    try:
        if not path.exists():
            _make_key(path)
        return {KEY_HEADER: path.read_text().strip()}
    except OSError as error:
        raise ConfigError(f"policy.directory: {path} cannot be used: {error.strerror}") from None


def _make_key(path: Path) -> None:
    """Write the whole file, then give it its name: another process may be making it now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()


class OperatorGuard:
    """ASGI middleware around vLLM. It lets requests with the operator's key pass, whatever they are.

    Other requests must come from this machine's programs, not from a web page elsewhere, and may use the agents'
    routes and read how the server is. It reads the key from the file that `LIGHTNING_OPERATOR_KEY_FILE` names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._key = Path(os.environ[KEY_FILE_VARIABLE]).read_text().strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "forbidden"})
        else:
            await _refuse(send, refusal)

    def _refusal(self, scope: Scope) -> LightningError | None:
        headers = scope["headers"]
        if any(name == KEY_HEADER.encode() and compare_digest(value, self._key) for name, value in headers):
            return None
        if (header := foreign(headers)) is not None:
            return Forbidden(f"this vLLM answers programs on this machine and its proxy only, not {header}")
        if not _is_open(scope.get("method", "GET"), _route(scope)):
            return Unauthorized(f"{_route(scope)} is for the operator: it needs the header {KEY_HEADER}")
        return None


def _route(scope: Scope) -> str:
    """The path as vLLM's router sees it, without --root-path."""
    root, path = scope.get("root_path", ""), str(scope["path"])
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _is_open(method: str, route: str) -> bool:
    if route in _READABLE:
        return method in ("GET", "HEAD")
    return route.startswith("/v1/") and route.rstrip("/") not in _CLOSED


async def _refuse(send: Send, error: LightningError) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
