"""One model server: a vLLM of others, without operator routes; how weights are loaded; whether it still answers so."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from contract.scripted import ASKED
from contract.system import Json, in_this_process, wait_until
from contract.vllm import PlayedVllm
from lightning_proxy.proxy.gateway import routing
from lightning_proxy.proxy.gateway.routing import LOOK_S, difference
from lightning_proxy.serving.vllm import VllmError, VllmFault, VllmServer, operator_session
from lightning_proxy.serving.vllm_worker import RELOAD, TiedHeads


async def test_a_server_that_does_not_list_its_models_serves_the_one_that_is_configured(tmp_path: Path) -> None:
    played = PlayedVllm(tmp_path)
    played.odd = b'{"models": []}'
    async with TestServer(played.app) as server, operator_session() as session:
        url = str(server.make_url("/v1"))
        assert await VllmServer(session, url, {}, "named").base_model() == "named"
        with pytest.raises(VllmError, match=r"GET /v1/models is not vLLM's"):
            await VllmServer(session, url, {}).base_model()


async def test_once_something_was_published_the_error_says_who_tells_what_is_missing(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routing, "WATCH_S", 0.02)
    async with start(publish="merged") as system:
        async with system.store() as store:
            await system.earlier_version(store, tmp_path)
        system.vllm.refuses["/weight_info"] = 404
        async with asyncio.timeout(20):
            while (await system.call("GET", "/readyz"))[0] != 503:
                await asyncio.sleep(0.05)
        assert "GET /weight_info" in (await system.lightning("status")).stdout
        status, answer = await system.chat("r")
        assert status == 503 and "doctor" in answer["error"]["message"]
    assert caplog.text.count("the policy is not served: ") == 1


@pytest.mark.parametrize("unasked", [True, False])
def test_a_usage_chunk_that_a_server_sends_unasked_stays(tmp_path: Path, unasked: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        asked = (await request.json()).get("stream_options", {}).get("include_usage")
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        chunks: list[Json] = [{"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}]
        chunks += [{"choices": [], "usage": usage}] * bool(unasked or asked)
        frames = [*map(json.dumps, chunks), "[DONE]"]
        return web.Response(text="".join(f"data: {frame}\n\n" for frame in frames), content_type="text/event-stream")

    def usages() -> int:
        return proxy.chat(None, stream=True).body.count(b'"usage"')

    with in_this_process(tmp_path) as proxy:
        proxy.vllm.odd = answer
        wait_until(lambda: usages() == unasked, 20, "it is known what the server sends")
        time.sleep(2 * LOOK_S)
        assert usages() == unasked


ODD = [
    b"", b"null", b"[1]", b"{broken", b"\xff", b'{"data": 3}', b'{"data": [{}]}',
    b'{"data": [{"id": 3, "parent": {}}], "weight_version": [], "is_paused": "x", "choices": [{"logprobs": []}]}',
    b'{"data": [{"id": "m"}], "choices": [], "sampling_params": 1, "token_ids": "x", "tokens": 5}',
    b'{"data": [{"id": "m", "max_model_len": "many"}], "choices": [{"token_ids": 1, "logprobs": {"content": {}}}]}',
    b'{"data": [{"id": "m"}], "choices": [{"token_ids": [1], "logprobs": {"content": [7]}}], "usage": [], '
    b'"prompt_token_ids": [1], "sampling_params": {"top_p": "x", "stop": 4}, "tokens": ["x"], "token_ids": [null]}',
]  # fmt: skip


@pytest.mark.parametrize("publish", ["merged", "lora"])
def test_whatever_a_server_answers_nobody_sees_a_traceback(
    tmp_path: Path, publish: str, caplog: pytest.LogCaptureFixture
) -> None:
    with in_this_process(tmp_path, policy={"publish": publish, "token_continuity": "exact"}) as proxy:
        for odd in ODD:
            proxy.vllm.odd = odd
            answers = [proxy.call("GET", path) for path in ("/readyz", "/v1/models")]
            answers += [proxy.post(path, {"model": "policy"} | body) for path, body in ASKED.items()]
            assert {answer.status for answer in answers} <= {200, 502, 503}, (odd, answers)
            done = proxy.run("doctor", "--json")
            assert done.returncode in (0, 1) and done.json and not done.stderr, (odd, done)
        proxy.run("status")
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


# Merged weights are loaded by our own method where vLLM has it, and by vLLM's where it does not.


async def test_a_vllm_that_others_started_reloads_by_its_own_method() -> None:
    calls: list[str] = []
    known: set[str] = set()

    async def operate(request: web.Request) -> web.Response:
        if request.path == "/collective_rpc":
            calls.append((await request.json())["method"])
            return web.Response(status=200 if calls[-1] in known else 500)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/{path:.*}", operate)
    async with TestServer(app) as played, operator_session() as session:
        server = VllmServer(session, str(played.make_url("/v1")), {})
        with pytest.raises(VllmFault):
            await server.load_weights("/somewhere")
        for method, asked in (("reload_weights", [RELOAD, "reload_weights"]), (RELOAD, [RELOAD])):
            calls.clear()
            known.add(method)
            await server.load_weights("/somewhere")
            assert calls == asked


def test_modules_that_share_a_weight_are_prepared_again_and_others_are_not() -> None:
    prepared: list[str] = []

    def module(name: str, weight: object) -> Any:
        method = SimpleNamespace(process_weights_after_loading=lambda layer: prepared.append(layer.name))
        return SimpleNamespace(name=name, weight=weight, quant_method=method)

    shared = object()
    modules = [module("embeddings", shared), module("layer", object()), module("head", shared), SimpleNamespace()]
    worker = TiedHeads()
    worker.reload_weights = lambda **options: prepared.append(options["weights_path"])
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: modules))
    worker.reload_with_tied_heads("/somewhere")
    assert prepared == ["/somewhere", "embeddings", "head"]


# Whether the policy's server still answers as the live version did, whatever its label says


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(routing, "LOOK_S", 0.02)
    monkeypatch.setattr(routing, "PROBE_S", 0.05)
    yield


def completions(vllm: Any) -> Any:
    """How a played vLLM answers by its weights alone, as a seed makes a real one do."""

    async def complete(_: web.Request) -> web.Response:
        top = {"token_id:5": -0.1 if vllm.weights == str(vllm.root) else -3.0, "token_id:6": -9.0}
        return web.json_response({"choices": [{"logprobs": {"tokens": ["token_id:5"], "top_logprobs": [top]}}]})

    return complete


async def until_it_says(system: Any, status: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (view := (await system.call("GET", "/readyz"))[1])["status"] != status:
            await asyncio.sleep(0.02)
    return dict(view)


async def probe_ok(system: Any) -> str:
    async with system.session.get(system.url + "/metrics") as answer:
        return re.findall(r"^lightning_policy_probe_ok (\S+)$", await answer.text(), re.M)[0]


@pytest.mark.usefixtures("often")
async def test_weights_that_were_replaced_behind_our_back_are_noticed(start: Any) -> None:
    async with start() as system:
        system.vllm.odd = completions(system.vllm)
        await until_it_says(system, "ready")
        await asyncio.sleep(0.3)  # it was asked for the first time
        out = (await system.lightning("status")).stdout
        assert re.search(r"probed +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC, .*s ago: its answers have not changed", out)
        theirs, system.vllm.weights = system.vllm.weights, "/tmp/of-somebody-else"
        assert "version 0 did: its log-probabilities differ by" in (await until_it_says(system, "degraded"))["policy"]
        told = (await system.get("/status"))["verified"]["problem"]
        assert "version 0 did: its log-probabilities differ by" in told
        assert await probe_ok(system) == "0.0"
        system.vllm.weights = theirs
        assert "policy" not in await until_it_says(system, "ready")
        assert await probe_ok(system) == "1.0"
        back = time.time()
        async with asyncio.timeout(20):
            while (await system.get("/status"))["verified"]["probed_at"] < back:
                await asyncio.sleep(0.02)


@pytest.mark.usefixtures("often")
async def test_an_adapter_that_was_replaced_under_its_name_is_loaded_again(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(publish="lora") as system:
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path, ["helper"])
        await system.post("/policy/promote", {"version": version})
        right = dict(system.vllm.adapters)
        assert right == {"policy-v1": str(tmp_path / "v1"), "policy-v1.helper": str(tmp_path / "v1" / "helper")}
        for name in right:
            system.vllm.adapters[name] = "/tmp/of-somebody-else"
            async with asyncio.timeout(20):
                while system.vllm.adapters != right:
                    await asyncio.sleep(0.02)
    assert caplog.text.count("vLLM does not serve policy version 1: loading it again") == 2


def test_answers_are_compared_as_long_as_the_same_tokens_came_before() -> None:
    one: list[Any] = [("a", {"a": -0.1, "b": -2.0}), ("a", {"a": -0.3}), ("b", {"b": -0.2})]
    assert difference(one, one) == 0
    moved: list[Any] = [("a", {"a": -0.2, "b": -2.2}), ("b", {"a": -0.6}), ("b", {"b": -8.0})]
    assert difference(one, moved) == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert difference(one, [("c", {"c": -0.1})]) == math.inf
    assert math.isnan(difference([], one))
