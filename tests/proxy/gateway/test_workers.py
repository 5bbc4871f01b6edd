"""The proxy as processes: workers that are killed, a proxy that is asked to stop, and connections that ask nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from lightning_proxy.proxy.gateway import server
from lightning_proxy.proxy.gateway.asgi import Memory
from lightning_proxy.proxy.gateway.server import calls_at_once
from support.served import Client, Proxy, proxy_in_front, settled, workers

CHAT = "/v1/chat/completions"
QUICK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
SLOW = QUICK | {"stream": True, "pause_s": 1}  # between chunks, of which there are four
FILES = 192


@asynccontextmanager
async def two_workers(directory: Path) -> AsyncIterator[Proxy]:
    async with proxy_in_front(directory) as proxy:
        proxy.set("proxy", workers=2)
        proxy.set("store", busy_timeout_s=20)
        await proxy.start()
        await settled(proxy, 2)
        yield proxy
        await proxy.end(signal.SIGTERM)


async def test_a_killed_worker_has_lost_no_answer_another_takes_its_place_and_metrics_are_those_of_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with two_workers(tmp_path) as proxy:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # so each call goes to a worker of its own
        async with aiohttp.ClientSession(connector=connector) as session:
            client = Client(proxy)
            await asyncio.gather(*(client.turn(session, f"r{i}", stream=False) for i in range(40)))
            for _ in range(6):
                async with session.get(proxy.url + "/metrics") as answer:
                    text = await answer.text()
                assert re.findall(r'^lightning_calls_total\{status="ok"\} (\S+)$', text, re.MULTILINE) == ["40.0"]
                assert re.findall(r'^lightning_rollouts\{.*"completed"\} (\S+)$', text, re.MULTILINE) == ["40.0"]

            async def work(rollout_id: str) -> None:
                for turn in itertools.count():
                    with contextlib.suppress(aiohttp.ClientError):
                        await client.turn(session, rollout_id, stream=turn % 2 == 0)

            working = [asyncio.create_task(work(f"shared-{i % 4}")) for i in range(12)]
            await asyncio.sleep(1)
            killed = min(workers(proxy))
            os.kill(killed, signal.SIGKILL)
            await settled(proxy, 2, without={killed})
            assert f"worker {killed} died (signal SIGKILL): another was started" in capfd.readouterr().err
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            assert client.statuses == {200}
            assert client.calls <= {call for (call,) in proxy.rows("SELECT call_id FROM calls WHERE status = 'ok'")}
            shared = "FROM calls WHERE rollout_id LIKE 'shared-%' GROUP BY rollout_id"
            assert proxy.rows(f"SELECT count(DISTINCT seq) - max(seq) {shared}") == [(1,)] * 4, "no place is empty"


async def test_workers_end_with_their_supervisor_however_it_ends_and_leave_the_port(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as proxy, aiohttp.ClientSession() as session:
        for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
            async with session.post(f"{proxy.url}/rollouts/long{CHAT}", json=SLOW) as answer:
                await answer.content.readany()  # it is under way
                left = workers(proxy)
                await proxy.end(number)
            assert proxy.process.returncode == code
            await proxy.start()
            await settled(proxy, 2, without=left)
            assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


@pytest.mark.long  # uvicorn waits half a minute for a worker that has gone
def test_workers_that_cannot_start_end_the_proxy_with_an_error(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings = {"proxy": {"workers": 2, "port": 0}, "store": {"url": f"sqlite:///{tmp_path}/store.db"}}
    config.write_text(yaml.safe_dump(settings | {"otel": {"otlp_endpoint": "http://127.0.0.1:9"}}))
    command = [sys.executable, "-m", "lightning_proxy.cli", "--config", str(config), "serve"]
    broken = os.environ | {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "99999"}  # larger than the queue
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=broken)
    assert done.returncode == 1
    assert "max_export_batch_size" in done.stderr
    assert "a worker of the proxy could not start" in done.stderr.splitlines()[-1]


# Asked to stop


async def begun(proxy: Proxy, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
    """An answer that has begun."""
    answer = await session.post(proxy.url + CHAT, json=SLOW)
    await answer.content.readany()
    return answer


async def ask_to_stop(proxy: Proxy, number: signal.Signals) -> None:
    """And wait until nobody listens at the address any more."""
    proxy.process.send_signal(number)
    with contextlib.suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.close()
            await asyncio.sleep(0.02)


async def test_an_answer_that_takes_longer_is_said_and_cut_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", stop_timeout_s=0.2)
        await proxy.start()
        answer = await begun(proxy, session)
        proxy.process.send_signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
        assert await proxy.process.wait() == 0
        assert proxy.rows("SELECT status FROM calls") == [("cancelled",)]
    told = capfd.readouterr().err
    assert "stopping: 1 call is under way, for at most 0.2 s more" in told
    assert "Traceback" not in told  # it is recorded, and no fault of the proxy


@pytest.mark.parametrize(
    ("workers", "status"), [(1, "cancelled"), pytest.param(2, "incomplete", marks=pytest.mark.long)]
)
async def test_a_second_ctrl_c_ends_it_now(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int, status: str
) -> None:
    async with proxy_in_front(tmp_path) as proxy, aiohttp.ClientSession() as session:
        proxy.set("proxy", workers=workers, stop_timeout_s=600)
        await proxy.start()
        answer = await begun(proxy, session)
        for _ in range(2):
            await ask_to_stop(proxy, signal.SIGINT)
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
        assert await proxy.process.wait() == 0
        await proxy.start()
        await proxy.end(signal.SIGTERM)
        assert proxy.rows("SELECT status FROM calls") == [(status,)]
    assert "Traceback" not in capfd.readouterr().err


# Connections that ask nothing and bodies that wait never take what calls need.


@asynccontextmanager
async def scarce(directory: Path, soft: int = FILES, more: Any = None, **access: Any) -> AsyncIterator[Proxy]:
    async with proxy_in_front(directory) as proxy:
        proxy.set("proxy", **access)
        proxy.config.write_text(yaml.safe_dump(yaml.safe_load(proxy.config.read_text()) | (more or {})))
        await proxy.start(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, FILES)))
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
        said = f"{calls_at_once(FILES)} calls at once, since {FILES} files may be open (ulimit -Hn)"
        assert said in capfd.readouterr().err
        url = proxy.url + CHAT
        for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"):
            async with contextlib.AsyncExitStack() as stack:
                streams = [session.post(url, json=SLOW) for _ in range(20)]
                begun = [await stream for stream in streams]
                await silent(proxy.port, 2 * FILES, stack, sent)
                for _ in range(5):
                    async with aiohttp.ClientSession() as new, new.post(url, json=QUICK) as answer:
                        assert answer.status == 200, await answer.text()
                assert all([(await answer.read()).rstrip().endswith(b"[DONE]") for answer in begun])


async def test_as_many_streams_work_at_once_as_the_start_says_and_others_are_told_to_wait(tmp_path: Path) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # none that the server closes meanwhile
    async with scarce(tmp_path) as proxy, aiohttp.ClientSession(connector=connector) as session:
        url, most = proxy.url + CHAT, calls_at_once(FILES)
        streams = [await session.post(url, json=SLOW) for _ in range(most)]
        async with session.post(url, json=QUICK) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert "open files" in (await refused.json())["error"]["message"]
        async with session.get(f"{proxy.url}/healthz") as alive:
            assert alive.status == 200
        whole = [(await answer.read()).rstrip().endswith(b"[DONE]") for answer in streams]
        assert {answer.status for answer in streams} == {200} and all(whole)
        async with session.post(url, json=QUICK) as answer:
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
        upstream = {"name": "hangs", "kind": "openai", "base_url": f"http://127.0.0.1:{hangs.getsockname()[1]}/v1"}
        scarcely = scarce(tmp_path, more={"upstreams": [upstream]}, api_keys=["k" * 20])
        async with scarcely as proxy, contextlib.AsyncExitStack() as stack:
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


async def test_no_memory_is_lost_by_those_who_give_up() -> None:
    memory = Memory(100, 100)
    for cancelled_first in (True, False):
        with memory.loan("all") as lent, memory.loan("leaves") as leaves:
            await lent.grow(100)
            leaving = asyncio.create_task(leaves.grow(50))
            await asyncio.sleep(0.01)
            for cancels in (cancelled_first, not cancelled_first):  # its turn comes at the very moment
                leaving.cancel() if cancels else lent.shrink()
            await asyncio.wait([leaving])
            assert leaving.cancelled() and leaves.size == 0
    memory, order = Memory(100, 100), list[str]()

    async def borrow(name: str, size: int) -> None:
        with memory.loan(name) as loan:
            await loan.grow(size)
            order.append(name)

    with memory.loan("first") as first:
        await first.grow(60)
        waiting = [asyncio.create_task(borrow(name, size)) for name, size in (("large", 90), ("small", 10))]
        await asyncio.sleep(0.01)
    await asyncio.gather(*waiting)
    assert order == ["large", "small"], "first come first served"
