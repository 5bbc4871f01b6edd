"""A vLLM of others, which has no operator routes: it is recorded, and only publishing asks for more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from contract.vllm import PlayedVllm
from lightning_proxy.proxy.gateway.routing import LOOK_S
from lightning_proxy.serving.vllm import VllmError, VllmServer, operator_session
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store


async def test_a_look_at_the_server_ends_with_the_proxy(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[asyncio.Future[None]] = []

    async def hangs(_: VllmServer) -> Any:
        looks.append(asyncio.get_running_loop().create_future())
        await looks[-1]

    async with running(tmp_path, publish="merged"):
        monkeypatch.setattr(VllmServer, "base_model", hangs)
        async with asyncio.timeout(20):  # it is looked at every second
            while not looks:
                await asyncio.sleep(0.05)
    assert all(look.cancelled() for look in looks)


async def test_once_something_was_published_the_error_says_who_tells_what_is_missing(
    running: Any, tmp_path: Path
) -> None:
    async with running(tmp_path, publish="merged") as system:
        async with opened(system.config.store) as database:
            await system.earlier_version(Store(database), tmp_path)
        system.vllm.refuses["/weight_info"] = 404
        async with asyncio.timeout(20):
            while "not possible: vLLM answered 404 to GET /weight_info" not in " ".join(
                (await system.lightning("status")).stdout.split()
            ):
                await asyncio.sleep(0.1)
            while (await system.call("GET", "/readyz"))[0] != 503:
                await asyncio.sleep(0.05)
        status, answer = await system.chat("r")
        assert status == 503 and "doctor" in answer["error"]["message"]


async def test_a_server_that_does_not_list_its_models_serves_the_one_that_is_configured(tmp_path: Path) -> None:
    played = PlayedVllm(tmp_path)
    played.odd = b'{"models": []}'
    async with TestServer(played.app) as server, operator_session() as session:
        url = str(server.make_url("/v1"))
        assert await VllmServer(session, url, {}, "named").base_model() == "named"
        with pytest.raises(VllmError, match=r"GET /v1/models is not vLLM's"):
            await VllmServer(session, url, {}).base_model()


@pytest.mark.parametrize("unasked", [True, False])
async def test_a_usage_chunk_that_a_server_sends_unasked_stays(running: Any, tmp_path: Path, unasked: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        asked = (await request.json()).get("stream_options", {}).get("include_usage")
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}]
        chunks += [{"choices": [], "usage": usage}] * bool(unasked or asked)
        frames = [*map(json.dumps, chunks), "[DONE]"]
        return web.Response(text="".join(f"data: {frame}\n\n" for frame in frames), content_type="text/event-stream")

    async with running(tmp_path) as system:
        system.vllm.odd = answer
        async with asyncio.timeout(20):
            while await usages(system) != unasked:
                await asyncio.sleep(0.1)
        await asyncio.sleep(2 * LOOK_S)
        assert await usages(system) == unasked


async def usages(system: Any) -> int:
    return (await raw(system, "POST", "/v1/chat/completions", ASK | {"stream": True}))[1].count('"usage"')


ODD = [
    b"", b"null", b"[1]", b"{broken", b"\xff", b'{"data": 3}', b'{"data": [{}]}',
    b'{"data": [{"id": 3, "parent": {}}], "weight_version": [], "is_paused": "x", "choices": [{"logprobs": []}]}',
    b'{"data": [{"id": "m"}], "choices": [], "sampling_params": 1, "token_ids": "x", "tokens": 5}',
    b'{"data": [{"id": "m", "max_model_len": "many"}], "choices": [{"token_ids": 1, "logprobs": {"content": {}}}]}',
    b'{"data": [{"id": "m"}], "choices": [{"token_ids": [1], "logprobs": {"content": [7]}}], "usage": [], '
    b'"prompt_token_ids": [1], "sampling_params": {"top_p": "x", "stop": 4}, "tokens": ["x"], "token_ids": [null]}',
]  # fmt: skip


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_whatever_a_server_answers_nobody_sees_a_traceback(
    running: Any, tmp_path: Path, publish: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, publish=publish, continuity="exact") as system:
        for odd in ODD:
            system.vllm.odd = odd
            for path in ("/readyz", "/v1/models"):
                assert (await raw(system, "GET", path))[0] in (200, 502, 503), (odd, path)
            for path, body in REQUESTS.items():
                status, text = await raw(system, "POST", path, body)
                assert status in (200, 502, 503), (odd, path, text)
            code, out, err = await system.lightning("doctor", "--json")
            assert code in (0, 1) and json.loads(out) and not err, (odd, err)
        (await system.lightning("status"))
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


ASK = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
REQUESTS = {
    "/v1/chat/completions": ASK,
    "/v1/messages": ASK,
    "/v1/responses": {"model": "policy", "input": "hi"},
    "/v1/completions": {"model": "policy", "prompt": "hi"},
}


async def raw(system: Any, method: str, path: str, body: Any = None) -> tuple[int, str]:
    async with system.session.request(method, system.url + path, json=body) as answer:
        return answer.status, (await answer.read()).decode(errors="replace")
