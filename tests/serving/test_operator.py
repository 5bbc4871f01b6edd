"""The key that opens a vLLM's operator routes, and the guard that asks for it."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvicorn
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.responses import PlainTextResponse

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.serving.operator import (
    KEY_FILE_VARIABLE,
    KEY_HEADER,
    RELAY_HEADER,
    OperatorGuard,
    key_file,
    operator_headers,
    relay_headers,
)
from support.fuzzing import METHODS, spellings

OPERATORS = (
    "/pause", "/collective_rpc", "/invocations", "/tokenize", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
AGENTS = ("/v1/chat/completions", "/v1/chat/completions/render")
READABLE = ("/health", "/version")
PAGE = {"Origin": "https://evil.example"}
REBOUND = {"Host": "evil.example"}


reached: list[str] = []  # the endpoints that answered, by name


def model_server() -> FastAPI:
    """Has routes as vLLM has them, and echoes at a WebSocket."""
    app = FastAPI()
    router = APIRouter()

    @router.websocket("/v1/realtime")
    async def realtime(connection: WebSocket) -> None:
        await connection.accept()
        await connection.send_text("hello")
        await connection.close()

    def answer(name: str) -> Callable[[], Awaitable[dict[str, str]]]:
        async def endpoint() -> dict[str, str]:
            reached.append(name)
            return {"reached": name}

        return endpoint

    for path in (*OPERATORS, *AGENTS, "/v1/responses/{response_id}/cancel"):
        router.add_api_route(path, answer(path), methods=["POST"])
    for path in (*READABLE, "/v1/models", "/v1/models/{name:path}"):
        router.add_api_route(path, answer(path), methods=["GET"])
    app.include_router(router)
    app.mount("/metrics", PlainTextResponse("some numbers"))
    within = FastAPI()
    within.add_api_route("/load_lora_adapter", answer("/v1/other/load_lora_adapter"), methods=["POST"])
    app.mount("/v1/other", within)
    app.add_middleware(OperatorGuard)
    return app


@pytest.fixture
async def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """The URL of a guarded server, and the header with its key."""
    header = operator_headers(tmp_path)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key_file(tmp_path)))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(model_server(), log_level="error"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", header
        server.should_exit = True
        await task


async def test_without_the_key_only_the_agents_routes_answer_programs_here(guarded: Any, tmp_path: Path) -> None:
    url, key = guarded
    async with aiohttp.ClientSession() as session:

        async def status(path: str, headers: dict[str, str], method: str = "POST") -> int:
            async with session.request(method, url + path, data="{}", headers=headers) as answer:
                return answer.status

        for path in OPERATORS:
            assert await status(path, {}) == 401, path
            assert await status(path, {KEY_HEADER: "guessed"}) == 401, path
            assert await status(path, key) == 200, path
        for path in AGENTS:
            assert await status(path, {}) == 200, path
            assert await status(path, {"Origin": "http://localhost:3000"}) == 200, path
        for foreign in (PAGE, REBOUND, {"Origin": "null"}):
            for path in (*OPERATORS, *AGENTS):
                assert await status(path, foreign) == 403, (path, foreign)
                assert await status(path, foreign, "OPTIONS") == 403, (path, foreign)
            assert await status(AGENTS[0], foreign | key) == 200, "the proxy vouches for it"
        for path in (*READABLE, "/metrics/"):
            assert (await status(path, {}, "GET"), await status(path, {})) == (200, 401), path
        for path in ("/v1/models", "/v1/models/org%2Fname", "/v1/models/org/na%20me"):
            assert await status(path, {}, "GET") == 200, path
        assert await status("/v1/responses/resp_1/cancel", {}) == 200
        relayed = relay_headers(tmp_path)  # the proxy's word for an agent's page
        assert set(relayed.values()).isdisjoint(key.values())
        for path, expected in (*((path, 200) for path in AGENTS), *((path, 401) for path in OPERATORS)):
            assert await status(path, relayed | PAGE) == expected, path


async def test_no_spelling_of_an_operators_route_reaches_it_without_the_key(guarded: Any) -> None:
    url, key = guarded
    address = urlsplit(url)
    reached.clear()
    assert await ask(address.port, "POST", "/v1/load_lora_adapter%0a", key) == 200, "vLLM's router takes it for this"
    assert reached == ["/v1/load_lora_adapter"]
    reached.clear()
    for operators in (*OPERATORS, "/v1/other/load_lora_adapter"):
        for path in spellings(operators, rounds=60):
            for method in METHODS if path.endswith("%0a") else ("POST",):
                assert await ask(address.port, method, path, {}) in (400, 401, 404, 405, 307), (method, path)
    assert not set(reached) - {*AGENTS, "/v1/models/{name:path}"}, reached
    assert await ask(address.port, "GET", "/v1/models/a%0a", {}) == 400


async def ask(port: int | None, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of an answer to a path that is sent unchanged; a client would write it in its own way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 2", "Connection: close"]
    writer.write("\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", "{}"]).encode())
    head = await reader.readline()
    writer.close()
    return int(head.split()[1])


async def test_a_websocket_of_a_web_page_is_closed(guarded: Any) -> None:
    url, _ = guarded
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{url}/v1/realtime") as here:
            assert await here.receive_str() == "hello"
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await session.ws_connect(f"{url}/v1/realtime", headers=PAGE)


def test_processes_that_start_together_make_one_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    directory = tmp_path / "policy"
    with ProcessPoolExecutor(4) as processes:
        keys = list(processes.map(operator_headers, [directory] * 16))
    assert len({key[KEY_HEADER] for key in keys}) == 1 and len(keys[0][KEY_HEADER]) > 40
    assert [file.name for file in directory.iterdir()] == [key_file(directory).name]
    assert stat.S_IMODE(key_file(directory).stat().st_mode) == 0o600


def test_a_directory_that_cannot_hold_the_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "policy").write_text("a file")
    with pytest.raises(ConfigError, match=rf"policy\.directory: {tmp_path}/policy/operator\.key"):
        operator_headers(tmp_path / "policy")


async def test_the_proxy_vouches_to_the_policys_server_alone(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["sk-browser"]) as system:
        directory = system.config.policy.directory
        key, relayed = operator_headers(directory)[KEY_HEADER], relay_headers(directory)[RELAY_HEADER]
        headers = {"Authorization": "Bearer sk-browser", "Origin": "https://app.example"}
        async with system.session.post(
            f"{system.url}/v1/chat/completions", json={"model": "policy", "messages": []}, headers=headers
        ) as answer:
            assert answer.status == 200 and relayed not in str(answer.headers) + await answer.text()
        assert system.vllm.requests[-1]["headers"].get(RELAY_HEADER) == relayed
        assert KEY_HEADER not in system.vllm.requests[-1]["headers"], "a call never carries what opens operator routes"
        content = (tmp_path / "store.db").read_bytes()
        assert key.encode() not in content and relayed.encode() not in content
