"""The key that opens a vLLM's operator routes, and the guard that asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, WebSocket

from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.proxy.policy.operator import (
    KEY_FILE_VARIABLE,
    KEY_HEADER,
    OperatorGuard,
    key_file,
    operator_headers,
)

OPERATORS = (
    "/pause", "/collective_rpc", "/invocations", "/tokenize", "/v1/load_lora_adapter", "/v1/%6coad_lora_adapter/",
)  # fmt: skip
AGENTS = ("/v1/chat/completions", "/v1/responses/resp_1/cancel", "/v1/chat/completions/render")
PAGE = {"Origin": "https://evil.example"}
REBOUND = {"Host": "evil.example"}


def model_server() -> FastAPI:
    """Answers every route, and echoes at a WebSocket."""
    app = FastAPI()

    @app.websocket("/v1/realtime")
    async def realtime(connection: WebSocket) -> None:
        await connection.accept()
        await connection.send_text("hello")
        await connection.close()

    @app.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS"])
    async def anything(path: str) -> dict[str, str]:
        return {"path": path}

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


async def test_without_the_key_only_the_agents_routes_answer_programs_here(guarded: Any) -> None:
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
        for path in ("/health", "/version", "/metrics"):
            assert (await status(path, {}, "GET"), await status(path, {})) == (200, 401), path


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


async def test_the_proxy_shows_the_key_to_the_policys_server_alone(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["sk-browser"]) as system:
        key = operator_headers(system.config.policy.directory)[KEY_HEADER]
        headers = {"Authorization": "Bearer sk-browser", "Origin": "https://app.example"}
        async with system.session.post(
            f"{system.url}/v1/chat/completions", json={"model": "policy", "messages": []}, headers=headers
        ) as answer:
            assert answer.status == 200 and key not in str(answer.headers) + await answer.text()
        assert system.vllm.headers[-1].get(KEY_HEADER) == key
        with contextlib.closing((tmp_path / "store.db").open("rb")) as store:
            assert key.encode() not in store.read()
