"""Where the environment names an HTTP proxy, what goes to our proxy does not pass it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from traffic.server import config_of

from lightning_proxy import client
from lightning_proxy.client.program import reached_directly
from lightning_proxy.core.config.upstreams import UpstreamConfig
from support.served import proxy_of

VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass
class HttpProxy:
    """Hands requests with absolute targets on, one a connection. `seen`: their first lines and heads."""

    url: str = ""
    seen: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.seen.append(head)
        url = urlsplit(head.split()[1])
        there, to = await asyncio.open_connection(url.hostname, url.port)
        head = head.replace(f"{url.scheme}://{url.netloc}", "").replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
        to.write(head.encode("latin-1"))
        sending = asyncio.create_task(_copy(reader, to))
        await _copy(there, writer)
        sending.cancel()
        to.close()
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()


@pytest.fixture
async def between(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpProxy]:
    """On a free port of the loopback interface, and in the environment."""
    proxy = HttpProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for name in VARIABLES:
        monkeypatch.setenv(name, proxy.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with server:
        yield proxy


PASS = "proxy-authorization: Basic dXNlcjpwQHNz"


def test_the_list_of_hosts_without_http_proxy_grows_by_ours() -> None:
    for url, there, upper, lower in (
        ("http://127.0.0.1:8080", {}, "127.0.0.1", "127.0.0.1"),
        ("http://proxy.example", {"no_proxy": "a, b"}, "a,b,proxy.example", "a,b,proxy.example"),
        ("http://a", {"NO_PROXY": "a,b", "no_proxy": "c"}, "a,b", "c,a"),
        ("http://a", {"NO_PROXY": "*"}, "*", "*"),
        ("http://[::1]:8080", {}, "::1,[::1]", "::1,[::1]"),
    ):
        env = reached_directly({"LIGHTNING_URL": url}, there)
        assert (env["NO_PROXY"], env["no_proxy"]) == (upper, lower)


async def test_the_client_asks_the_proxy_directly(running: Any, tmp_path: Path, between: HttpProxy) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]

    def agent(url: str) -> dict[str, str]:
        with client.rollout("r1", url=url) as run, run.openai() as llm:
            llm.chat.completions.create(model="policy", messages=messages)
            client.emit_reward(0.5, final=False)
            return run.environ

    async with running(tmp_path) as system:
        environ = await asyncio.to_thread(agent, system.url)
        async with client.rollout("r2", url=system.url) as run, run.async_openai() as llm:
            await llm.chat.completions.create(model="policy", messages=messages)
        assert (between.seen, environ["NO_PROXY"]) == ([], "127.0.0.1")
        assert len((await system.call("GET", "/rollouts/r2"))[1]["calls"]) == 1


@pytest.mark.parametrize("trusts", [True, False])
async def test_an_upstream_is_asked_through_the_http_proxy_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, between: HttpProxy, trusts: bool
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", between.url.replace("//", "//user:p%40ss@"))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asked = {"name": "m", "kind": "openai", "base_url": f"{base}/v1", "models": ["m"], "api_key": "sk-1"}
        config = config_of("http://127.0.0.1:1", tmp_path)
        config.upstreams.append(UpstreamConfig.model_validate(asked | {"trust_env": trusts}))
        async with (
            proxy_of(config) as url,
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": []}) as reply,
        ):
            assert reply.status == 200
        assert [head.split()[1] for head in between.seen] == [f"{base}/v1/chat/completions"] * trusts
        assert all("secret" not in head and "Bearer sk-1" in head and PASS in head for head in between.seen)
