"""How request bodies are read: the key first, in limited time, and all of them in limited memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.gateway import asgi, server

Running = Callable[..., AbstractAsyncContextManager[Any]]
CONTROL = ("/reward", "/rollouts", "/rollouts/r1/events", "/rollouts/r1/end", "/policy/promote", "/otlp/v1/traces")
PATHS = ("/v1/chat/completions", *CONTROL)


class Connection:
    """A raw connection that sends a request as slowly as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def head(self, path: str, length: int, key: str = "agent", method: str = "POST", more: str = "") -> None:
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n{more}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()
        )

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        raw = await self._reader.readexactly(int(headers["content-length"]))
        is_json = headers["content-type"].startswith("application/json")
        return int(first.split()[1]), headers, json.loads(raw) if is_json else raw


@asynccontextmanager
async def connected(system: Any) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(system.url.rsplit(":", 1)[1]))
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


@pytest.mark.parametrize("path", PATHS)
async def test_a_wrong_key_is_refused_before_the_body_has_come(running: Running, tmp_path: Path, path: str) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system, connected(system) as client:
        client.head(path, 30_000_000, key="nobody")
        status, _, body = await client.answer()
        if path.startswith("/otlp"):  # an answer of OpenTelemetry's own shape
            assert (status, body["message"][:11]) == (401, "a valid API")
        else:
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_the_key_is_judged_before_the_body_is_looked_at(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"], admin_keys=["admin"], max_body_mb=0.01) as system:
        for body in (b"{", b"{}", b"x" * 20_000):
            for path in PATHS:
                assert (await system.call("POST", path, body, Authorization="Bearer nobody"))[0] == 401, path
            agent = {"Authorization": "Bearer agent"}
            assert (await system.call("POST", "/policy/promote", body, **agent))[0] == 401
        assert (await system.call("POST", "/policy/promote", b"{}", Authorization="Bearer admin"))[0] == 422


async def test_a_preflight_which_needs_no_key_brings_no_body(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system, connected(system) as client:
        more = "Origin: http://127.0.0.1\r\nAccess-Control-Request-Method: POST\r\n"
        client.head("/v1/embeddings", 30_000_000, key="nobody", method="OPTIONS", more=more)
        assert (await client.answer())[0] in (403, 404, 405)  # what the upstream answers


@pytest.mark.parametrize("path", ["/reward", "/v1/chat/completions", "/otlp/v1/traces"])
@pytest.mark.parametrize("begun", [b"", b"{" * 100_000])
async def test_a_body_that_does_not_come_is_given_up(running: Running, tmp_path: Path, path: str, begun: bytes) -> None:
    async with running(tmp_path, api_keys=["agent"], body_timeout_s=0.2) as system, connected(system) as client:
        client.head(path, 1_000_000)
        client.send(begun)
        status, headers, body = await client.answer()
        assert (status, headers["connection"], "body_timeout_s" in str(body)) == (408, "close", True)


async def test_while_large_bodies_come_others_wait_and_small_ones_do_not(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "WAIT_S", 0.3)
    reward = json.dumps({"rollout_id": "r1", "reward": 1, "comment": "x" * 9_000}).encode()
    async with running(tmp_path, max_body_mb=1, max_bodies_mb=1) as system:
        await system.chat("r1")
        async with connected(system) as slow, connected(system) as other:
            slow.head("/reward", 900_000)
            slow.send(b"[" + b" " * 400_000)
            await asyncio.sleep(0.1)
            assert (await system.call("POST", "/reward", reward))[0] == 200
            other.head("/rollouts", 900_000)
            other.send(b" " * 600_000)
            status, headers, _ = await other.answer()
            assert (status, headers["retry-after"]) == (503, "1")
            slow.send(b" " * (900_000 - 400_002 - len(reward)) + reward + b"]")
            assert (await slow.answer())[0] == 200
        many = json.dumps([json.loads(reward)] * 100).encode()  # 0.9 MB: all there is, again
        assert [(await system.call("POST", "/reward", many))[0] for _ in range(2)] == [200, 200]


async def test_an_answer_that_nobody_takes_ends(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "UNTAKEN_S", 0.3)
    notes = [{"kind": "note", "value": "x" * 20_000}] * 45
    async with running(tmp_path) as system:
        for _ in range(22):
            assert (await system.call("POST", "/rollouts/r1/events", notes))[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", int(system.url.rsplit(":", 1)[1]), limit=2**12)
        writer.write(b"GET /rollouts/r1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(3)
        taken = 0
        with suppress(ConnectionError):
            while piece := await asyncio.wait_for(reader.read(2**20), 10):
                taken += len(piece)
        writer.close()
        assert taken < 19_000_000
        assert (await system.call("GET", "/rollouts/r1"))[0] == 200  # who takes it gets all of it


async def test_every_route_but_those_of_health_and_documents_asks_for_a_key(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        _, document = await system.call("GET", "/openapi.json")
        routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        assert {("POST", path.replace("/r1/", "/{rollout_id}/")) for path in CONTROL[:-1]} < routes
        for method, path in routes - {("GET", path) for path in ("/healthz", "/readyz", "/metrics")}:
            assert (await system.call(method, path.replace("{rollout_id}", "r1")))[0] == 401, (method, path)
