"""Connections that ask nothing and bodies that wait: they never take what calls need."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from lightning_proxy.core.errors import Overloaded
from lightning_proxy.proxy.gateway import server
from lightning_proxy.proxy.gateway.asgi import Memory
from lightning_proxy.proxy.gateway.server import calls_at_once
from support.served import Proxy, proxy_in_front

FILES = 192
CALL = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def files(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def scarce(directory: Path, soft: int = FILES, *, key: str = "", upstream: str = "") -> AsyncIterator[Proxy]:
    async with proxy_in_front(directory) as proxy:
        if key:
            proxy.set("proxy", api_keys=[key])
        if upstream:
            settings = yaml.safe_load(proxy.config.read_text())
            settings["upstreams"] = [{"name": "hangs", "kind": "openai", "base_url": upstream}]
            proxy.config.write_text(yaml.safe_dump(settings))
        await proxy.start(files(soft, FILES))
        yield proxy
        await proxy.end(signal.SIGTERM)


async def silent(port: int, count: int, stack: contextlib.AsyncExitStack, sent: bytes = b"") -> None:
    for _ in range(count):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(sent)


async def test_calls_are_answered_whatever_silent_connections_there_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with scarce(tmp_path, soft=128) as proxy, aiohttp.ClientSession() as session:
        assert f"{calls_at_once(FILES)} calls at once: {FILES} files may be open (ulimit -Hn)" in capfd.readouterr().err
        url = f"{proxy.url}/v1/chat/completions"
        for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"):
            async with contextlib.AsyncExitStack() as stack:
                streams = [session.post(url, json=CALL | {"stream": True, "pause_s": 1}) for _ in range(20)]
                begun = [await stream for stream in streams]
                await silent(proxy.port, 2 * FILES, stack, sent)
                for _ in range(5):
                    async with aiohttp.ClientSession() as new, new.post(url, json=CALL) as answer:
                        assert answer.status == 200, await answer.text()
                assert all([(await answer.read()).rstrip().endswith(b"[DONE]") for answer in begun])


async def test_as_many_streams_work_at_once_as_the_start_says_and_others_are_told_to_wait(tmp_path: Path) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # none that the server closes meanwhile
    async with scarce(tmp_path) as proxy, aiohttp.ClientSession(connector=connector) as session:
        url, most = f"{proxy.url}/v1/chat/completions", calls_at_once(FILES)
        streams = [await session.post(url, json=CALL | {"stream": True, "pause_s": 1}) for _ in range(most)]
        async with session.post(url, json=CALL) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert "open files" in (await refused.json())["error"]["message"]
        async with session.get(f"{proxy.url}/healthz") as alive:
            assert alive.status == 200
        whole = [(await answer.read()).rstrip().endswith(b"[DONE]") for answer in streams]
        assert {answer.status for answer in streams} == {200} and all(whole)
        async with session.post(url, json=CALL) as answer:
            assert answer.status == 200


async def test_a_head_that_does_not_come_ends_its_connection(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with running(tmp_path) as system:
        port = int(system.url.rsplit(":", 1)[1])
        for first, then, answers in (
            (b"", b"", []),
            (b"\r\n", b"", []),
            (whole[:20], whole[20:24], [b"408"]),
            (whole + whole[:20], b"", [b"200", b"408"]),
            (whole, b"\r\n", [b"200"]),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            got = await reader.readuntil(b"}") if first.startswith(whole) else b""
            writer.write(then)
            got += await asyncio.wait_for(reader.read(), 20)
            assert [part.split()[0] for part in got.split(b"HTTP/1.1 ")[1:]] == answers, first
            writer.close()


async def test_preflights_at_a_server_that_hangs_and_answers_that_nobody_reads_take_no_places(tmp_path: Path) -> None:
    asks = b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
    asks += b"Access-Control-Request-Method: GET\r\n\r\n"
    unread = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60
    with socket.create_server(("127.0.0.1", 0), backlog=512) as hangs, contextlib.ExitStack() as peers:
        url = f"http://127.0.0.1:{hangs.getsockname()[1]}/v1"
        async with scarce(tmp_path, key="k" * 20, upstream=url) as proxy, contextlib.AsyncExitStack() as stack:
            await silent(proxy.port, calls_at_once(FILES) + 5, stack, asks)
            await asyncio.sleep(2)
            for _ in range(calls_at_once(FILES) + 5):
                peer = peers.enter_context(socket.socket())
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await asyncio.to_thread(peer.connect, ("127.0.0.1", proxy.port))
                peer.send(unread)
            for _ in range(15):
                headers = {"x-api-key": "k" * 20}
                async with aiohttp.ClientSession() as new, new.get(f"{proxy.url}/rollouts", headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                await asyncio.sleep(0.2)


async def test_bodies_that_come_later_wait_in_the_order_in_which_they_came() -> None:
    memory, order = Memory(100, 100), list[str]()

    async def borrow(name: str, size: int) -> None:
        with memory.loan(name) as loan:
            await loan.grow(size)
            order.append(name)

    with memory.loan("first") as first:
        await first.grow(60)
        waiting = [asyncio.create_task(borrow(name, size)) for name, size in (("large", 90), ("small", 10))]
        await asyncio.sleep(0.01)
        assert order == []
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]


async def test_no_memory_is_lost_by_those_who_give_up() -> None:
    memory = Memory(100, 100, wait_s=0.05)
    with memory.loan("all") as lent, memory.loan("late") as late:
        await lent.grow(100)
        with pytest.raises(Overloaded):
            await late.grow(50)
    for cancelled_first in (True, False):
        with memory.loan("all") as lent, memory.loan("leaves") as leaves:
            await lent.grow(100)
            leaving = asyncio.create_task(leaves.grow(50))
            await asyncio.sleep(0.01)
            for cancels in (cancelled_first, not cancelled_first):  # its turn comes at the very moment
                leaving.cancel() if cancels else lent.shrink()
            await asyncio.wait([leaving])
            assert leaving.cancelled() and leaves.size == 0
