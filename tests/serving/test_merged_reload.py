"""Merged weights are loaded by our own method where vLLM has it, and by vLLM's where it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.serving.vllm import VllmFault, VllmServer, operator_session
from lightning_proxy.serving.vllm_worker import RELOAD, TiedHeads


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
