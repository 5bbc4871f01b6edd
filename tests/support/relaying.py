"""The relay under a real uvicorn, in front of any upstream, with a recorder that tells what it was given."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from lightning_proxy.commands.serve import uvicorn_options
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import ProxyConfig, RecordingConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.core.errors import Unauthorized
from lightning_proxy.core.records import CallEnd, CallStart
from lightning_proxy.proxy.access.auth import Caller
from lightning_proxy.proxy.gateway.asgi import Bodies
from lightning_proxy.proxy.gateway.attempts import Upstreams
from lightning_proxy.proxy.gateway.call import Gateway
from lightning_proxy.proxy.gateway.metrics import Metrics
from lightning_proxy.proxy.gateway.relay import Relay
from lightning_proxy.proxy.gateway.upstream import Route, make_session
from lightning_proxy.store.rollouts import RolloutKey

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class MemoryRecorder:
    def __init__(self) -> None:
        self.starts: list[CallStart] = []
        self.ends: list[CallEnd] = []
        self.ended = asyncio.Event()

    async def start(self, start: CallStart, also: Any = ()) -> None:
        self.starts.append(start)

    async def end(self, end: CallEnd, also: Any = ()) -> None:
        self.ends.append(end)
        self.ended.set()

    async def end_large(self, end: CallEnd, also: Any = ()) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.end(end, also))


class OneUpstream:
    """Sends every model there; the alias is version 3 of `base`."""

    alias = "policy"

    def __init__(self, upstream: UpstreamConfig) -> None:
        self._upstream = upstream

    async def route(self, rollout: Any, model: str | None, *, recorded: bool = False) -> Route:
        return Route(self._upstream, "base" if model == "policy" else None, 3 if model == "policy" else None)

    def alias_entry(self) -> dict[str, Any]:
        return {"id": "policy", "object": "model"}


class OpenDoor:
    async def authenticate(self, headers: Any) -> Caller:
        if headers.get("authorization") == "Bearer wrong":
            raise Unauthorized("wrong key")
        return Caller(RolloutKey("of-key") if headers.get("authorization") == "Bearer rollout-key" else None, True)


def relay_of(config: Config, upstreams: Upstreams, recorder: Any, router: Any) -> Relay:
    return Relay(config, OpenDoor(), Gateway(config, router, upstreams, recorder, Metrics()), Bodies(config.proxy))


@asynccontextmanager
async def relaying(
    base: str,
    recorder: Any,
    *,
    max_body_mb: float = 0.01,
    on_disconnect: Any = "abort",
    finish_timeout_s: float = 300.0,
    **upstream: Any,
) -> AsyncIterator[str]:
    """A proxy in front of `base`; yields its root URL."""
    recording = RecordingConfig(on_disconnect=on_disconnect, finish_timeout_s=finish_timeout_s)
    config = Config(proxy=ProxyConfig(max_body_mb=max_body_mb), recording=recording)
    target = UpstreamConfig(name="up", base_url=f"{base}/v1", **upstream)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with make_session() as session:
            relay = relay_of(config, Upstreams(session), recorder, OneUpstream(target))
            options = uvicorn_options(config.proxy) | {"log_level": "critical"}
            server = uvicorn.Server(uvicorn.Config(relay, lifespan="off", **options))
            task = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.001)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await task


@asynccontextmanager
async def speaking(handler: Handler) -> AsyncIterator[str]:
    """A server that reads a request's head and leaves the rest of the connection to `handler`; yields its root URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
