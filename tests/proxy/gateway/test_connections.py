"""Connections that ask nothing: they never take the files that calls need."""

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

from lightning_proxy.proxy.gateway import server
from lightning_proxy.proxy.gateway.server import calls_at_once
from support.served import Proxy, proxy_in_front

FILES = 192
CALL = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def files(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def scarce(directory: Path, soft: int = FILES, hard: int = FILES) -> AsyncIterator[Proxy]:
    async with proxy_in_front(directory) as proxy:
        await proxy.start(files(soft, hard))
        yield proxy
        await proxy.end(signal.SIGTERM)


async def silent(port: int, count: int, stack: contextlib.AsyncExitStack, sent: bytes = b"") -> None:
    for _ in range(count):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(sent)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"])
async def test_calls_are_answered_whatever_silent_connections_there_are(tmp_path: Path, sent: bytes) -> None:
    async with scarce(tmp_path) as proxy, contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"{proxy.url}/v1/chat/completions"
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


async def test_the_soft_limit_is_raised_and_the_start_says_what_it_allows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with scarce(tmp_path, soft=128, hard=640):
        pass
    assert f"{calls_at_once(640)} calls at once: 640 files may be open (ulimit -Hn)" in capfd.readouterr().err


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.3)


@pytest.mark.usefixtures("hurried")
async def test_a_head_that_does_not_come_ends_its_connection(running: Any, tmp_path: Path) -> None:
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


async def test_preflights_at_a_server_that_hangs_take_no_places_of_calls(tmp_path: Path) -> None:
    asks = b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
    asks += b"Access-Control-Request-Method: GET\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0), backlog=512) as hangs:
        async with proxy_in_front(tmp_path) as proxy, contextlib.AsyncExitStack() as stack:
            url = f"http://127.0.0.1:{hangs.getsockname()[1]}/v1"
            proxy.set("proxy", api_keys=["k" * 20])
            settings = yaml.safe_load(proxy.config.read_text())
            settings["upstreams"] = [{"name": "hangs", "kind": "openai", "base_url": url}]
            proxy.config.write_text(yaml.safe_dump(settings))
            await proxy.start(files(FILES, FILES))
            await silent(proxy.port, calls_at_once(FILES) + 5, stack, asks)
            await asyncio.sleep(2)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            async with session.get(f"{proxy.url}/rollouts", headers={"x-api-key": "k" * 20}) as answer:
                assert answer.status == 200, await answer.text()
            await proxy.end(signal.SIGTERM)


async def test_answers_that_nobody_reads_take_no_places_of_calls(tmp_path: Path) -> None:
    key = {"Authorization": f"Bearer {'k' * 20}"}
    many = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60
    async with proxy_in_front(tmp_path) as proxy:
        proxy.set("proxy", api_keys=["k" * 20])
        await proxy.start(files(FILES, FILES))
        with contextlib.ExitStack() as stack:
            for _ in range(calls_at_once(FILES) + 5):
                peer = stack.enter_context(socket.socket())
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await asyncio.to_thread(peer.connect, ("127.0.0.1", proxy.port))
                peer.send(many)
            for _ in range(15):
                url = f"{proxy.url}/v1/chat/completions"
                async with aiohttp.ClientSession(headers=key) as new, new.post(url, json=CALL) as answer:
                    assert answer.status == 200, await answer.text()
                await asyncio.sleep(0.2)
        await proxy.end(signal.SIGTERM)
