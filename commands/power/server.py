"""Power sampling as an upstream of its own: a small HTTP server in front of the policy's vLLM."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from ...proxy.config.upstreams import UpstreamConfig
from ...proxy.errors import LightningError, Unsupported
from ...proxy.gateway.relay import parse_object
from ...proxy.policy.operator import operator_headers
from ...proxy.policy.vllm import operator_session
from .chat import CHAT, PowerChat

log = logging.getLogger(__name__)
MOST_BYTES = 2**30  # of a request; the proxy has its own limit
_KEYS = ("authorization", "x-api-key")


@asynccontextmanager
async def power_server(upstream: UpstreamConfig, vllm: UpstreamConfig, directory: Path) -> AsyncIterator[None]:
    """Answer at the address of `upstream`, sampling from `vllm`, until the block is left.

    `directory`: where the operator's key of this vLLM is.
    """
    own = operator_headers(directory)
    async with operator_session() as session:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", _Handler(PowerChat(session, vllm.urls[0]), own).answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await _listen(runner, upstream.urls[0])
            yield
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, url: str) -> None:
    address = urlsplit(url)
    try:
        await web.TCPSite(runner, address.hostname, address.port).start()
    except OSError as error:
        raise LightningError(f"power sampling cannot be served at {url}: {error.strerror}") from None


class _Handler:
    """Answers requests. vLLM gets the key that a request carries, and the operator's."""

    def __init__(self, chat: PowerChat, operator: Mapping[str, str]) -> None:
        self._chat = chat
        self._operator = operator

    async def answer(self, request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in _KEYS if name in request.headers} | {**self._operator}
        try:
            if request.path != CHAT:
                raise Unsupported(f"power sampling answers {CHAT} only, not {request.path}")
            status, content_type, body = await self._chat.answer(parse_object(await request.read()), headers)
        except LightningError as error:
            return web.json_response(error.body(), status=error.status)
        except Exception:
            log.exception("power sampling: internal error")
            return web.json_response(LightningError("internal error of power sampling").body(), status=500)
        return web.Response(body=body, status=status, headers={"content-type": content_type})
