"""Where the environment names an HTTP proxy, what goes to our proxy does not pass it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lightning_proxy import client
from lightning_proxy.client.program import reached_directly
from support.http_proxy import http_proxy
from support.relaying import MemoryRecorder, relaying, speaking

Running = Callable[..., AbstractAsyncContextManager[Any]]

PASS = "proxy-authorization: Basic dXNlcjpwQHNz"


@pytest.mark.parametrize(
    ("url", "there", "upper", "lower"),
    [
        ("http://127.0.0.1:8080", {}, "127.0.0.1", "127.0.0.1"),
        ("http://proxy.example", {"no_proxy": "a, b"}, "a,b,proxy.example", "a,b,proxy.example"),
        ("http://a", {"NO_PROXY": "a,b", "no_proxy": "c"}, "a,b", "c,a"),
        ("http://a", {"NO_PROXY": "*"}, "*", "*"),
        ("http://[::1]:8080", {}, "::1,[::1]", "::1,[::1]"),
    ],
)
def test_the_list_of_hosts_without_http_proxy_grows_by_ours(
    url: str, there: dict[str, str], upper: str, lower: str
) -> None:
    env = reached_directly({"LIGHTNING_URL": url}, there)
    assert (env["NO_PROXY"], env["no_proxy"]) == (upper, lower)


async def test_the_client_asks_the_proxy_directly(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]

    def agent(url: str) -> dict[str, str]:
        with client.rollout("r1", url=url) as run, run.openai() as llm:
            llm.chat.completions.create(model="policy", messages=messages)
            client.emit_reward(0.5, final=False)
            return run.environ

    async with running(tmp_path) as system, http_proxy() as between:
        between.in_environment(monkeypatch)
        environ = await asyncio.to_thread(agent, system.url)
        async with client.rollout("r2", url=system.url) as run, run.async_openai() as llm:
            await llm.chat.completions.create(model="policy", messages=messages)
        assert (between.seen, environ["NO_PROXY"]) == ([], "127.0.0.1")
        assert len((await system.call("GET", "/rollouts/r2"))[1]["calls"]) == 1


@pytest.mark.parametrize("trusts", [True, False])
async def test_an_upstream_is_asked_through_the_http_proxy_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusts: bool
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with http_proxy() as between, speaking(answer) as base:
        between.in_environment(monkeypatch)
        monkeypatch.setenv("http_proxy", between.url.replace("//", "//user:p%40ss@"))
        async with (
            relaying(base, MemoryRecorder(), kind="openai", api_key="sk-1", trust_env=trusts) as url,
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": []}) as reply,
        ):
            assert reply.status == 200
        assert [head.split()[1] for head in between.seen] == [f"{base}/v1/chat/completions"] * trusts
        assert all("secret" not in head and "Bearer sk-1" in head and PASS in head for head in between.seen)
