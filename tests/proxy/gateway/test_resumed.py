"""Responses that go on after their answer: what polling or resuming them brings is in the record of their call."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from support.cases import Case, cases_with
from support.in_process import proxy_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
USAGE = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}


class Upstream:
    """Answers what the test has planned, in order: an object, or a list of a stream's pieces, the last may be None."""

    def __init__(self) -> None:
        self.planned: list[Any] = []
        self.app = web.Application()
        self.app.router.add_route("*", "/v1/{route:.+}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        planned = self.planned.pop(0)
        if isinstance(planned, dict):
            return web.json_response(planned)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in planned:
            if piece is None:
                assert request.transport is not None
                request.transport.abort()
                break
            await answer.write(piece.encode())
            await asyncio.sleep(0.01)
        return answer


class Agent:
    def __init__(self, session: aiohttp.ClientSession, upstream: Upstream, case: str) -> None:
        self._session, self._upstream, self.case = session, upstream, case
        self.rollout = f"r{case}"

    async def ask(self, method: str, path: str, body: Json | None, answer: Any, *, named: bool = True) -> bytes:
        """What the agent gets, as far as it comes."""
        self._upstream.planned.append(answer)
        got, url = b"", (f"/rollouts/{self.rollout}" if named else "") + path
        headers = {} if named else {"Authorization": f"Bearer {self.case}"}
        async with self._session.request(method, url, json=body, headers=headers) as reply:
            assert reply.status == 200
            self.rollout = reply.headers.get("X-Rollout-Id", self.rollout)
            try:
                async for piece in reply.content.iter_any():
                    got += piece
            except aiohttp.ClientPayloadError:
                pass
        return got

    async def call(self) -> Json:
        return (await self.whole())["calls"][0]  # type: ignore[no-any-return]

    async def whole(self) -> Json:
        async with self._session.get(f"/rollouts/{self.rollout}") as reply:
            found: Json = await reply.json()
            return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[aiohttp.ClientSession, Upstream]]:
    upstream, directory = Upstream(), tmp_path_factory.mktemp("resumed")
    async with TestServer(upstream.app) as server:
        config = Config(
            store=StoreConfig(url=f"sqlite:///{directory}/store.db"),
            upstreams=[UpstreamConfig(name="up", kind="openai", base_url=str(server.make_url("/v1")))],
        )
        async with proxy_of(config) as url, aiohttp.ClientSession(url) as session:
            yield session, upstream


@pytest.fixture
def agent(served: tuple[aiohttp.ClientSession, Upstream]) -> Agent:
    return Agent(*served, uuid.uuid4().hex)


def response(agent: Agent, status: str, **fields: Any) -> Json:
    base = {"id": f"resp_{agent.case}", "object": "response", "created_at": 1, "background": True, "model": "m"}
    return base | {"status": status, "output": [], "error": None, "usage": None} | fields


def said(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def event(kind: str, n: int, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': n} | fields)}\n\n"


BACKGROUND = {"model": "m", "input": "hi", "background": True}


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("case", cases_with("first", "later"), ids=lambda case: case["name"])
async def test_a_polled_response_is_in_the_record_of_its_call(case: Case, agent: Agent, named: bool) -> None:
    case = json.loads(json.dumps(case).replace("%CASE%", agent.case))
    path, request, answer = case["first"]
    await agent.ask("POST", path, {"model": "m"} | request, answer, named=named)
    assert (await agent.call())["status"] == "incomplete"
    for method, path, answer in case["later"]:
        assert json.loads(await agent.ask(method, path, None, answer, named=named)) == answer
    call = await agent.call()
    assert call["status"] == "ok"
    assert [[t["id"], t["name"], t["arguments"]] for t in call["tool_calls"]] == case["tool_calls"]
    assert (call["usage"], call["finish_reason"]) == (case["usage"], case["finish_reason"])
    assert call["response"] == case["later"][-1][2]


async def test_polling_on_changes_nothing_and_counts_the_call_once(agent: Agent) -> None:
    await agent.ask("POST", "/v1/responses", BACKGROUND, response(agent, "queued"))
    item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"}
    ended = response(agent, "completed", output=[item], usage=USAGE)
    path = f"/v1/responses/resp_{agent.case}"
    await asyncio.gather(*(agent.ask("GET", path, None, ended) for _ in range(4)))
    before = await agent.call()
    await agent.ask("GET", path, None, ended | {"output": [said("other")]})
    whole = await agent.whole()
    assert whole["calls"] == [before] and before["status"] == "ok" and len(before["tool_calls"]) == 1
    assert whole["tokens"] == USAGE["output_tokens"]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_response_that_failed_later_is_recorded_as_that(agent: Agent, status: str) -> None:
    await agent.ask("POST", "/v1/responses", BACKGROUND, response(agent, "queued"))
    error = {"code": "server_error", "message": "boom"} if status == "failed" else None
    ended = response(agent, status, error=error)
    await agent.ask("POST", f"/v1/responses/resp_{agent.case}/cancel", None, ended)
    call = await agent.call()
    assert (call["status"], call["response"]) == ("error", ended)
    assert ("boom" if error else "cancelled") in call["error"]


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
async def test_a_stream_that_broke_off_and_was_resumed_is_whole(agent: Agent, named: bool) -> None:
    created = event("response.created", 0, response=response(agent, "in_progress"))
    delta = event("response.output_text.delta", 1, item_id="msg_1", output_index=0, content_index=0, delta="Hel")
    await agent.ask("POST", "/v1/responses", BACKGROUND | {"stream": True}, [created, delta, None], named=named)
    assert (await agent.call())["status"] == "error"
    ended = response(agent, "completed", output=[said("Hello")], usage=USAGE)
    rest = [
        event("response.output_text.delta", 2, item_id="msg_1", output_index=0, content_index=0, delta="lo"),
        event("response.completed", 3, response=ended),
    ]
    path = f"/v1/responses/resp_{agent.case}?stream=true&starting_after=1"
    assert await agent.ask("GET", path, None, rest, named=named) == "".join(rest).encode()
    call = await agent.call()
    assert (call["status"], call["response"], call["usage"], call["error"]) == ("ok", ended, USAGE, None)
