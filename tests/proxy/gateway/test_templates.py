"""What a server's template makes of Messages is asked once, and again where the server could not say it yet."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.core.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.dialects.as_chat.translation import PROBES, Template
from lightning_proxy.proxy.gateway.attempts import Upstreams
from lightning_proxy.proxy.gateway.through_chat import Templates
from lightning_proxy.proxy.gateway.upstream import Request, Route, make_session


def asking(app: web.Application, statuses: list[int] | None = None, go: asyncio.Event | None = None) -> list[str]:
    """Answer what a template is learnt by; returns the models that were asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["model"])
        if go is not None:
            await go.wait()
        return web.json_response({"prompt_token_ids": [1], "input_tokens": 1}, status=statuses[0] if statuses else 200)

    app.router.add_post("/v1/{rest:.*}", answer)
    return asked


def route(server: TestServer) -> Route:
    return Route(UpstreamConfig(name="up", base_url=str(server.make_url("/v1"))), "base", 0)


REQUEST = Request("POST", "/v1/messages", b"", [], b"", False)
LEARNT = Template(None, "low", True)


async def test_a_template_is_asked_for_until_the_server_can_say_it() -> None:
    for statuses, known, times in (
        ([200, 200], [LEARNT] * 2, 1),
        ([503, 200], [Template(), LEARNT], 2),
        ([401, 200], [Template(), LEARNT], 2),  # whoever came first has no key
        ([404, 200], [Template()] * 2, 1),  # another server, or an older one
    ):
        asked = asking(app := web.Application(), statuses)
        async with TestServer(app) as server, make_session() as session:
            templates = Templates(Upstreams(session))
            for expected in known:
                assert await templates.learned(route(server), REQUEST) == expected
                statuses.pop(0)
        assert asked == ["base"] * times * len(PROBES)


async def test_requests_that_come_at_once_ask_once() -> None:
    asked = asking(app := web.Application(), go=(go := asyncio.Event()))
    async with TestServer(app) as server, make_session() as session:
        templates = Templates(Upstreams(session))
        first, *others = (asyncio.create_task(templates.learned(route(server), REQUEST)) for _ in range(5))
        while len(asked) < len(PROBES):
            await asyncio.sleep(0.001)
        first.cancel()  # its agent left
        go.set()
        assert await asyncio.gather(*others) == [LEARNT] * 4
    assert len(asked) == len(PROBES)
