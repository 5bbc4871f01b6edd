"""A client of the proxy's control API for commands, or of the store alone if no proxy is running."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import unquote, urlencode

import aiohttp
import typer

from ..core.errors import LightningError
from ..core.json_text import loads
from .formats import address
from .signals import run_until_signal

if TYPE_CHECKING:
    from ..core.config.root import Config
    from ..core.records import Mode

T = TypeVar("T")
UNAUTHORIZED = 401
AWAY = (None, 502, 503, 504)
LIMITED = 429
RETRY_S = 1.0
HERE = ("127.0.0.1", 0)


class ApiError(LightningError):
    """A request failed, or another program answered it. `status_code` is the HTTP status if it is known, else None."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class ProxyNotThere(ApiError):
    """No connection to the proxy is possible, most often because it is not running."""

    def __init__(self, url: str) -> None:
        super().__init__(f"no proxy answers at {url}; start it with `lightning-proxy serve`, or wait for `up`")


@dataclass(frozen=True, slots=True)
class OpenRollout:
    rollout_id: str
    base_url: str
    api_key: str


class ApiClient:
    """Use as `async with ApiClient(url) as api:`. Requests that fail raise ApiError.

    A request is retried for up to `patience_s` seconds while the proxy limits the key. Once a request has succeeded or
    was limited, it is also retried while the proxy is down or cannot write.
    """

    def __init__(self, url: str, api_key: str | None = None, *, patience_s: float = 0.0) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._reached = False
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, config: Config, *, patience_s: float = 0.0) -> ApiClient:
        """Return a client of the configured proxy. Its key is LIGHTNING_API_KEY, or else one from the configuration."""
        proxy = config.proxy
        configured = [key.get_secret_value() for key in proxy.admin_keys or proxy.api_keys]
        # A key read from a file may end with a line break.
        key = os.environ.get("LIGHTNING_API_KEY", "").strip() or next(iter(configured), None)
        return cls(f"http://{address(proxy.host, proxy.port)}", key, patience_s=patience_s)

    async def __aenter__(self) -> Self:
        timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(headers=self.headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def open_rollouts(self, task_id: str, mode: Mode, n: int, **choice: Any) -> list[OpenRollout]:
        """Open `n` rollouts as siblings. `choice` holds more fields of POST /rollouts, such as `policy_version`."""
        answer = await self.request("POST", "/rollouts", {"task_id": task_id, "mode": mode, "n": n, **choice})
        return [OpenRollout(one["rollout_id"], one["base_url"], one["api_key"]) for one in answer]

    async def end_rollout(self, rollout_id: str, status: str, reason: str | None = None) -> None:
        await self.request("POST", f"/rollouts/{rollout_id}/end", {"status": status, "reason": reason})

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        return await self.request("GET", f"/rollouts/{rollout_id}")

    async def rollouts(self, **filters: str | int | None) -> dict[str, Any]:
        params = {name: str(value) for name, value in filters.items() if value is not None}
        return await self.request("GET", "/rollouts", params=params)

    async def every_rollout(self, page: int = 1000, **filters: str | None) -> AsyncGenerator[dict[str, Any]]:
        """Yield the matching rollouts, newest first, fetching a page at a time."""
        cursor: str | None = None
        while True:
            found = await self.rollouts(**filters, limit=page, cursor=cursor)
            for rollout in found["data"]:
                yield rollout
            if (cursor := found["next_cursor"]) is None:
                return

    async def delete_rollout(self, rollout_id: str) -> None:
        await self.request("DELETE", f"/rollouts/{rollout_id}")

    async def policy(self) -> dict[str, Any]:
        return await self.request("GET", "/policy")

    async def readiness(self) -> dict[str, Any]:
        """Return the body of /readyz, whether the proxy is ready or not. Raises ApiError if no proxy answers."""
        _, ready = await self._send("GET", "/readyz", None, None)
        if not isinstance(ready, dict) or not {"status", "store", "upstream"} <= ready.keys():
            raise ApiError(f"the server at {self.url} is not lightning-proxy")
        return ready

    async def request(self, method: str, path: str, body: Any = None, params: dict[str, str] | None = None) -> Any:
        """Send a request, with retries. Return the decoded answer, or raise ApiError with the proxy's message."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                status, data = await self._send(method, path, body, params)
                if status < 400:
                    self._reached = True
                    return data
                said = data.get("error") if isinstance(data, dict) else None
                message = said.get("message") if isinstance(said, dict) else str(data)[:300]
                hint = "; commands read the key from LIGHTNING_API_KEY" if status == UNAUTHORIZED else ""
                raise ApiError(f"{method} {path}: {message}{hint} (HTTP {status})", status)
            except ApiError as error:
                self._reached |= error.status_code == LIMITED
                passes = error.status_code in (*AWAY, LIMITED)
                if not self._reached or not passes or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _send(self, method: str, path: str, body: Any, params: dict[str, str] | None) -> tuple[int, Any]:
        assert self._session is not None, "use `async with`"
        try:
            async with self._session.request(method, self.url + path, json=body, params=params) as answer:
                text, status = await answer.read(), answer.status
        except aiohttp.ClientConnectorError:
            raise ProxyNotThere(self.url) from None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ApiError(f"no usable answer from the proxy at {self.url}: {why}") from None
        try:
            return status, loads(text) if text else None
        except ValueError:
            raise ApiError(f"the server at {self.url} is not lightning-proxy (HTTP {status})", status) from None


def ask(config: Config, work: Callable[[ApiClient], Awaitable[T]]) -> T:
    """Do `work` with a client of the configured proxy. SIGINT and SIGTERM stop it and raise Interrupted."""

    async def run() -> T:
        async with ApiClient.of(config) as api:
            return await work(api)

    return run_until_signal(run())


def look(config: Config, work: Callable[[ApiClient], Awaitable[T]]) -> T:
    """Do `work`, which only reads, with a client of the proxy, or of its store if no proxy is running."""
    try:
        return ask(config, work)
    except ProxyNotThere as error:
        if not config.store.may_be_there:
            raise
        note = f"{error.message.partition(';')[0]}: showing the store {config.store.where}"

    async def alone() -> T:
        async with StoreClient(config) as api:
            typer.echo(note, err=True)
            return await work(api)

    return run_until_signal(alone())


class StoreClient(ApiClient):
    """Calls the API's read routes in this process. No key is needed: the caller can read the store anyway."""

    def __init__(self, config: Config) -> None:
        from pydantic import SecretStr

        from ..proxy.app import Dispatch, api_to_read

        key = token_urlsafe(16)
        super().__init__(ApiClient.of(config).url, key)
        proxy = config.proxy.model_copy(update={"api_keys": [SecretStr(key)]})
        api = api_to_read(config.model_copy(update={"proxy": proxy}))
        self._app, self._lifespan = Dispatch(api), api.router.lifespan_context(api)

    async def __aenter__(self) -> Self:
        await self._lifespan.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._lifespan.__aexit__(None, None, None)

    async def _send(self, method: str, path: str, body: Any, params: dict[str, str] | None) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "scheme": "http",
            "method": method, "path": unquote(path), "raw_path": path.encode(), "root_path": "", "client": HERE,
            "query_string": (query or urlencode(params or {})).encode(), "server": HERE,
            "headers": [(b"host", b"127.0.0.1"), (b"authorization", self.headers["Authorization"].encode())],
        }  # fmt: skip
        requests, answer = asyncio.Queue[Any](), list[Any]()
        requests.put_nowait({"type": "http.request"})  # after it, the client does not leave

        async def send(message: Any) -> None:
            answer.append(message)

        await self._app(scope, requests.get, send)
        text = b"".join(message.get("body", b"") for message in answer)
        return answer[0]["status"], loads(text) if text else None
