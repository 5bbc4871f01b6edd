"""A proxy in front of a server that answers what a test says, in the shape of the API that is asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from lightning_proxy.commands.serve import uvicorn_options
from lightning_proxy.proxy.app import create_app
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import ProxyConfig, StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from support.sections import PolicyConfig
from support.stores import store_url

Json = dict[str, Any]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


class ScriptedServer:
    """Answers with `answer`: a message (chat), its content (Messages), the items of an output (Responses), a status."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.planned: dict[str, Any] = {}  # by the header `x-planned`, for calls at the same time
        self.ids = itertools.count()
        self.app = web.Application()
        self.app.router.add_post("/v1/{path:.*}", self.reply)

    async def reply(self, request: web.Request) -> web.Response:
        await request.read()
        answer = self.answer
        if (planned := request.headers.get("x-planned")) is not None:
            answer = self.planned.pop(planned)
            await asyncio.sleep(float(request.headers.get("x-wait", "0")))
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "busy"}}, status=answer)
        answer_id = f"answer_{next(self.ids)}_of_the_server"
        if request.path == RESPONSES:
            said: Json = {"object": "response", "status": "completed", "output": answer}
        elif request.path == f"{RESPONSES}/compact":
            said = {"object": "response.compaction", "output": answer}
        elif request.path == MESSAGES:
            said = {"type": "message", "role": "assistant", "content": answer, "stop_reason": "end_turn"}
        else:
            said = {"choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]}
        return web.json_response({"id": answer_id, "model": "m"} | said)


class Proxy:
    """A proxy in front of a scripted server."""

    def __init__(self, url: str, server: ScriptedServer, session: aiohttp.ClientSession, config: Config) -> None:
        self.url, self.config = url, config
        self._server, self._session = server, session

    async def ask(self, path: str, request: Json, answer: Any, **headers: str) -> str:
        """Ask, have this answered, and return the rollout; no text where the call is not recorded."""
        return (await self.asked(path, request, answer, **headers))[0]

    async def asked(self, path: str, request: Json, answer: Any, **headers: str) -> tuple[str, Json]:
        """Ask, have this answered, and return the rollout and the answer's body."""
        self._server.answer = answer
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"model": "m"} | request
        async with self._session.post(self.url + path, json=body, headers=named) as reply:
            said = await reply.json()
            assert reply.status == (answer if isinstance(answer, int) else 200), said
            return "" if path.endswith("/compact") else reply.headers["x-rollout-id"], said

    async def called(self, request: Json, answer: Any, plan: str, headers: dict[str, str]) -> tuple[str, str]:
        """Ask by chat, have this answered, and return the rollout and the call. `plan`: a name of this call's own."""
        self._server.planned[plan] = answer
        body, named = {"model": "m"} | request, headers | {"x-planned": plan}
        async with self._session.post(self.url + CHAT, json=body, headers=named) as reply:
            assert reply.status == (answer if isinstance(answer, int) else 200), await reply.text()
            return reply.headers["x-rollout-id"], reply.headers["x-call-id"]

    async def post(self, path: str, body: Json) -> Any:
        async with self._session.post(self.url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def rollout(self, rollout_id: str, requests: str = "whole") -> Json:
        async with self._session.get(f"{self.url}/rollouts/{rollout_id}?requests={requests}") as reply:
            found: Json = await reply.json()
            return found

    async def get(self, path: str) -> Json:
        async with self._session.get(self.url + path) as reply:
            found: Json = await reply.json()
            return found

    async def results(self, rollout_id: str) -> list[list[Any]]:
        """For each call that made tool calls, the results recorded for them."""
        calls = (await self.rollout(rollout_id))["calls"]
        return [[tool["result"] for tool in call["tool_calls"]] for call in calls if call["tool_calls"]]


@asynccontextmanager
async def scripted(root: Path, proxies: int = 1) -> AsyncIterator[Sequence[Proxy]]:
    """Yield proxies in front of one server, on one store."""
    server = ScriptedServer()
    runner = web.AppRunner(server.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    upstream = UpstreamConfig(name="up", kind="openai", base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    config = Config(
        proxy=ProxyConfig(),
        store=StoreConfig(url=store_url(root)),
        upstreams=[upstream],
        policy=PolicyConfig(directory=root / "policy"),
    )
    servers = [
        uvicorn.Server(uvicorn.Config(create_app(config), **uvicorn_options(config.proxy) | {"port": 0}))
        for _ in range(proxies)
    ]
    tasks = [asyncio.create_task(each.serve()) for each in servers]
    while not all(each.started for each in servers):
        await asyncio.sleep(0.01)
    try:
        async with aiohttp.ClientSession() as session:
            ports = [each.servers[0].sockets[0].getsockname()[1] for each in servers]
            yield [Proxy(f"http://127.0.0.1:{port}", server, session, config) for port in ports]
    finally:
        for each in servers:
            each.should_exit = True
        await asyncio.gather(*tasks)
        await runner.cleanup()
