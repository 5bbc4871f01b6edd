"""A small HTTP proxy that keeps what comes by, as the environment's HTTP_PROXY may name one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass
class HttpProxy:
    """Hands requests with absolute targets on, one a connection. `seen`: their first lines and heads."""

    url: str = ""
    seen: list[str] = field(default_factory=list)

    def in_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in VARIABLES:
            monkeypatch.setenv(name, self.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.seen.append(head)
            method, target, version = head.partition("\r\n")[0].split(" ")
            url = urlsplit(target)
            if method == "CONNECT" or not url.hostname:
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
                return
            there, to = await asyncio.open_connection(url.hostname, url.port or 80)
            rest = head.partition("\r\n")[2].replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
            path = target.partition(url.netloc)[2] or "/"
            to.write(f"{method} {path} {version}\r\n{rest}".encode("latin-1"))
            sending = asyncio.create_task(_copy(reader, to))
            await _copy(there, writer)
            sending.cancel()
            to.close()
        finally:
            writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()


@asynccontextmanager
async def http_proxy() -> AsyncIterator[HttpProxy]:
    """Serve it on a free port of the loopback interface."""
    proxy = HttpProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield proxy
