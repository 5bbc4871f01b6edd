"""An HTTP server that answers for a model: /v1/chat/completions, /v1/responses, /v1/messages, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from traffic.shapes import stream

from contract.system import listening as serving  # noqa: F401
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.upstreams import UpstreamConfig
from support.sections import PolicyConfig

Json = dict[str, Any]
# Status and body for a request; None: no answer ever.
Answer = Callable[[web.Request, Json], Awaitable[tuple[int, Json] | None]]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def app(answer: Answer) -> web.Application:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answered = await answer(request, body)
        if answered is None:
            await asyncio.sleep(60)
            return web.Response(status=504)
        status, whole = answered
        headers = {"X-Played": str(request.get("number", ""))}
        if status != 200 or not body.get("stream"):
            return web.json_response(whole, status=status, headers=headers)
        response = web.StreamResponse(headers=headers | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in stream(request.path, whole, body):
            await response.write(event)
        return response

    async def models(_: web.Request) -> web.Response:
        entry = {"id": "base", "object": "model", "parent": None, "root": "/", "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [entry]})

    async def operate(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default", "is_paused": False})

    application = web.Application(client_max_size=64 * 2**20)
    for path in PATHS:
        application.router.add_post(path, handle)
    application.router.add_get("/v1/models", models)
    application.router.add_get("/weight_info", operate)
    application.router.add_get("/is_paused", operate)
    return application


def config_of(upstream: str, directory: Path) -> Config:
    """Of a proxy in front of an upstream, its store in a directory."""
    return Config(
        store=StoreConfig(url=f"sqlite:///{directory}/store.db"),
        upstreams=[UpstreamConfig(name="policy", base_url=f"{upstream}/v1")],
        policy=PolicyConfig(publish="merged", directory=directory / "policy"),
    )
