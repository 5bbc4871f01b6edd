"""What a server's template makes of Messages is asked once, and again while the server does not say."""

from __future__ import annotations

from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.proxy.apis.as_chat.template import PROBES, Template
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.upstreams.attempts import Upstreams
from lightning_proxy.proxy.upstreams.base import Request
from lightning_proxy.proxy.upstreams.http import make_session
from lightning_proxy.proxy.upstreams.templates import Templates


async def test_a_template_is_asked_for_until_it_is_known() -> None:
    models: list[str] = []
    status = 503

    async def answer(request: web.Request) -> web.Response:
        models.append((await request.json())["model"])
        return web.json_response({"prompt_token_ids": [1], "input_tokens": 1}, status=status)

    app = web.Application()
    app.router.add_post("/v1/{rest:.*}", answer)
    request = Request("POST", "/v1/messages", b"", [], b"", False)
    async with TestServer(app) as server, make_session() as session:
        upstream = UpstreamConfig(name="up", base_url=str(server.make_url("/v1")))
        templates = Templates(Upstreams(session))
        assert await templates.of(upstream, request, "base") == Template()
        status = 200
        known = await templates.of(upstream, request, "base")
        assert known == Template(None, "low", True)
        assert await templates.of(upstream, request, "base") == known
    assert models == ["base"] * 2 * len(PROBES)
