"""What a server's template makes of Messages is asked once, and again where the server could not say it yet."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.dialects.as_chat.translation import PROBES, Template
from lightning_proxy.proxy.gateway.attempts import Upstreams
from lightning_proxy.proxy.gateway.through_chat import Templates
from lightning_proxy.proxy.gateway.upstream import Request, Route, make_session


@pytest.mark.parametrize(
    ("statuses", "known", "asked"),
    [
        ([200, 200], [Template(None, "low", True)] * 2, 1),
        ([503, 200], [Template(), Template(None, "low", True)], 2),
        ([401, 200], [Template(), Template(None, "low", True)], 2),  # whoever came first has no key
        ([404, 200], [Template()] * 2, 1),  # another server, or an older one
    ],
)
async def test_a_template_is_asked_for_until_the_server_can_say_it(
    statuses: list[int], known: list[Template], asked: int
) -> None:
    models: list[str] = []
    left = [*statuses]

    async def answer(request: web.Request) -> web.Response:
        models.append((await request.json())["model"])
        return web.json_response({"prompt_token_ids": [1], "input_tokens": 1}, status=left[0])

    app = web.Application()
    app.router.add_post("/v1/{rest:.*}", answer)
    request = Request("POST", "/v1/messages", b"", [], b"", False)
    async with TestServer(app) as server, make_session() as session:
        route = Route(UpstreamConfig(name="up", base_url=str(server.make_url("/v1"))), "base", 0)
        templates = Templates(Upstreams(session))
        for expected in known:
            assert await templates.learned(route, request) == expected
            left.pop(0)
    assert models == ["base"] * asked * len(PROBES)


async def test_requests_that_come_at_once_ask_once() -> None:
    asked: list[str] = []
    go = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        await go.wait()
        return web.json_response({"prompt_token_ids": [1], "input_tokens": 1})

    app = web.Application()
    app.router.add_post("/v1/{rest:.*}", answer)
    request = Request("POST", "/v1/messages", b"", [], b"", False)
    async with TestServer(app) as server, make_session() as session:
        route = Route(UpstreamConfig(name="up", base_url=str(server.make_url("/v1"))), "base", 0)
        templates = Templates(Upstreams(session))
        first, *others = (asyncio.create_task(templates.learned(route, request)) for _ in range(5))
        while len(asked) < len(PROBES):
            await asyncio.sleep(0.001)
        first.cancel()  # its agent left
        go.set()
        assert await asyncio.gather(*others) == [Template(None, "low", True)] * 4
    assert len(asked) == len(PROBES)
