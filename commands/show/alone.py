"""Answers what the proxy would, from the store alone, where no proxy runs. Nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from secrets import token_urlsafe
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlencode

import typer

from ...core.json_text import loads
from ..api_client import ApiClient, ProxyNotThere, ask
from ..signals import run_until_signal

if TYPE_CHECKING:
    from ...core.config.root import Config

T = TypeVar("T")
HERE = ("127.0.0.1", 0)


def look(config: Config, work: Callable[[ApiClient], Awaitable[T]]) -> T:
    """Do `work`, which only reads, with a client of the proxy; of its store, if no proxy is there."""
    try:
        return ask(config, work)
    except ProxyNotThere as error:
        if not config.store.may_be_there:
            raise
        note = f"{error.message.partition(';')[0]}: this is the store {config.store.where}"

    async def alone() -> T:
        async with StoreClient(config) as api:
            typer.echo(note, err=True)
            return await work(api)

    return run_until_signal(alone())


class StoreClient(ApiClient):
    """A client of the routes that read, in this process. Whoever can read the store needs no key."""

    def __init__(self, config: Config) -> None:
        from pydantic import SecretStr

        from ...proxy.app import Dispatch, api_to_read

        key = token_urlsafe(16)
        super().__init__(ApiClient.of(config).url, key)
        proxy = config.proxy.model_copy(update={"api_keys": [SecretStr(key)]})
        self._api = api_to_read(config.model_copy(update={"proxy": proxy}))
        self._app = Dispatch(self._api, forwards=False)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> StoreClient:
        await self._stack.enter_async_context(self._api.router.lifespan_context(self._api))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _send(self, method: str, path: str, body: Any, params: dict[str, str] | None) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "scheme": "http",
            "method": method, "path": unquote(path), "raw_path": path.encode(), "root_path": "", "client": HERE,
            "query_string": (query or urlencode(params or {})).encode(), "server": HERE,
            "headers": [(b"host", b"127.0.0.1"), (b"authorization", self.headers["Authorization"].encode())],
        }  # fmt: skip
        status, parts, asked = 0, list[bytes](), False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # the client does not leave
            asked = True
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        text = b"".join(parts)
        return status, loads(text) if text else None
