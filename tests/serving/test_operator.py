"""The key that opens a vLLM's operator routes, and the guard that asks for it."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.responses import PlainTextResponse

from contract.raw import send, statuses
from contract.system import client, free_port, in_a_thread, in_this_process, running
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
READABLE = ("/health", "/ping", "/version", "/load")
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
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of a guarded server, and the header with its key."""
    header = operator_headers(tmp_path)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key_file(tmp_path)))
    with in_a_thread(running(model_server(), port=free_port(), log_level="error")) as url:
        yield url, header


def test_without_the_key_only_the_agents_routes_answer_programs_here(guarded: Any, tmp_path: Path) -> None:
    url, key = guarded
    relayed = relay_headers(tmp_path)  # the proxy's word for an agent's page
    assert set(relayed.values()).isdisjoint(key.values())
    with client() as http:

        def status(path: str, headers: dict[str, str], method: str = "POST") -> int:
            return http.request(method, url + path, content=b"{}", headers=headers).status_code

        for path in OPERATORS:
            ways = ({}, {KEY_HEADER: "guessed"}, relayed | PAGE, key)
            assert [status(path, headers) for headers in ways] == [401, 401, 401, 200], path
        for path in AGENTS:
            ways = ({}, {"Origin": "http://localhost:3000"}, relayed | PAGE, PAGE | key)
            assert [status(path, headers) for headers in ways] == [200] * 4, path
        for foreign in (PAGE, REBOUND, {"Origin": "null"}):
            for path in (*OPERATORS, *AGENTS):
                assert [status(path, foreign, method) for method in ("POST", "OPTIONS")] == [403, 403], (path, foreign)
        for path in (*READABLE, "/metrics/"):
            for headers in ({}, relayed | PAGE):
                assert [status(path, headers, method) for method in ("GET", "POST")] == [200, 401], path
        for path in ("/v1/models", "/v1/models/org%2Fname", "/v1/models/org/na%20me"):
            assert status(path, {}, "GET") == 200, path
        assert status("/v1/responses/resp_1/cancel", {}) == 200


def test_no_spelling_of_an_operators_route_reaches_it_without_the_key(guarded: Any) -> None:
    url, key = guarded

    def ask(method: str, path: str, *headers: str) -> int:
        """The status of an answer to a path that is sent unchanged; a client would write it in its own way."""
        own = ("Host: 127.0.0.1", "Content-Length: 2", "Connection: close")
        lines = [f"{method} {path} HTTP/1.1", *own, *headers, "", "{}"]
        return statuses(send(url, "\r\n".join(lines).encode()))[0]

    reached.clear()
    load = ask("POST", "/v1/load_lora_adapter%0a", f"{KEY_HEADER}: {key[KEY_HEADER]}")
    assert (load, reached) == (200, ["/v1/load_lora_adapter"]), "vLLM's router takes it for this"
    reached.clear()
    for operators in (*OPERATORS, "/v1/other/load_lora_adapter"):
        for path in spellings(operators, rounds=60):
            for method in METHODS if path.endswith("%0a") else ("POST",):
                assert ask(method, path) in (400, 401, 404, 405, 307), (method, path)
    assert not set(reached) - {*AGENTS, "/v1/models/{name:path}"}, reached
    assert ask("GET", "/v1/models/a%0a") == 400


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


def test_the_proxy_vouches_to_the_policys_server_alone(tmp_path: Path) -> None:
    with in_this_process(tmp_path, proxy={"api_keys": ["sk-browser"]}) as proxy:
        key, relayed = operator_headers(tmp_path / "policy")[KEY_HEADER], relay_headers(tmp_path / "policy")
        body = {"model": "policy", "messages": []}
        answer = proxy.post("/v1/chat/completions", body, "sk-browser", Origin="https://app.example")
        assert answer.status == 200 and relayed[RELAY_HEADER] not in str(answer)
        asked = proxy.vllm.requests[-1]["headers"]
        assert asked.get(RELAY_HEADER) == relayed[RELAY_HEADER]
        assert KEY_HEADER not in asked, "a call never carries what opens operator routes"
        content = (tmp_path / "store.db").read_bytes()
        assert key.encode() not in content and relayed[RELAY_HEADER].encode() not in content
