"""Messages and Responses through the chat route of a whole proxy; vLLM is played, and keeps no responses itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from aiohttp.test_utils import TestServer

from lightning_proxy.proxy.app import create_app
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.config.server import RecordingConfig, RedactConfig, StoreConfig
from lightning_proxy.proxy.config.upstreams import UpstreamConfig
from lightning_proxy.proxy.conversation.earlier import Earlier
from lightning_proxy.proxy.store.calls import Calls
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.store import Store
from support.sections import PolicyConfig

Json = dict[str, Any]

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
TOO_LONG = {"error": {"message": "max_completion_tokens is too large", "type": "BadRequestError", "code": 400}}
UNKNOWN = {"error": {"message": "Response with id not found", "type": "NotFoundError", "code": 404}}
ASKED: dict[str, Json] = {RESPONSES: {"input": "hi"}, MESSAGES: {"messages": [], "max_tokens": 9}}


class PlayedVllm:
    """Its chat route says how many messages it was asked with, or `refusal`; its other routes know no responses."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Json]] = []
        self.refusal: tuple[int, Any] | None = None
        self.breaks = False
        self.stream: bytes | None = None
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.app.router.add_post("/v1/{own}", self._own)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base", "parent": None, "root": "/base"}]})

    async def _own(self, request: web.Request) -> web.Response:
        self.asked.append((request.match_info["own"], await request.json()))
        return web.json_response(UNKNOWN, status=404)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((CHAT, body))
        if self.refusal is not None:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}}
        said = {"role": "assistant", "content": f"{len(body['messages'])} messages"}
        top = {"id": "x", "created": 1, "model": body["model"], "prompt_token_ids": [1, 2], "usage": usage}
        if not body.get("stream"):
            return web.json_response(top | {"choices": [choice | {"message": said}]})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if self.stream is not None:
            await answer.write(self.stream)
            return answer
        choice |= {"delta": said, "finish_reason": None if self.breaks else "stop"}
        choice["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}]}
        await answer.write(f"data: {json.dumps(top | {'choices': [choice]})}\n\n".encode())
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
            return answer
        await answer.write(b"data: [DONE]\n\n")
        return answer


class Proxy:
    def __init__(self, session: aiohttp.ClientSession, vllm: PlayedVllm) -> None:
        self.session, self.vllm = session, vllm

    async def ask(self, path: str = RESPONSES, **body: Any) -> tuple[int, Json]:
        asked = {"model": "policy"} | ASKED[path] | body
        async with self.session.post(f"/rollouts/r/v1/{path}", json=asked) as answer:
            return answer.status, await answer.json()

    async def respond(self, **body: Any) -> str:
        """The id of a response."""
        status, response = await self.ask(**body)
        assert status == 200, response
        return str(response["id"])

    async def calls(self) -> list[Json]:
        async with self.session.get("/rollouts/r") as answer:
            calls: list[Json] = (await answer.json())["calls"]
            return calls

    async def delete(self) -> None:
        async with self.session.post("/rollouts/r/end", json={"status": "completed"}) as answer:
            assert answer.status == 200
        async with self.session.delete("/rollouts/r") as answer:
            assert answer.status == 204, await answer.text()


@asynccontextmanager
async def served(
    tmp_path: Path, vllm: PlayedVllm, redact: RedactConfig | None = None, fallback: PlayedVllm | None = None
) -> AsyncIterator[Proxy]:
    async with TestServer(vllm.app) as upstream, TestServer((fallback or PlayedVllm()).app) as second:
        policy, other = str(upstream.make_url("/v1")), str(second.make_url("/v1"))
        config = Config(
            store=StoreConfig(url=f"sqlite:///{tmp_path}/store.db"),
            upstreams=[
                UpstreamConfig(name="policy", base_url=policy, retries=0, fallbacks=["other"] if fallback else []),
                UpstreamConfig(
                    name="other", kind="openai", base_url=other, models=["theirs"], model_map={"policy": "theirs"}
                ),
            ],
            policy=PolicyConfig(publish="lora", directory=tmp_path / "policy"),
            recording=RecordingConfig(redact=redact or RedactConfig()),
        )
        server = uvicorn.Server(uvicorn.Config(create_app(config), port=0, log_level="warning", access_log=False))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            port = server.servers[0].sockets[0].getsockname()[1]
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                yield Proxy(session, vllm)
        finally:
            server.should_exit = True
            await task


async def test_a_refused_request_that_goes_on_is_not_told_that_what_it_goes_on_with_is_unknown(tmp_path: Path) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        first = await proxy.respond()
        proxy.vllm.refusal = 400, TOO_LONG
        status, body = await proxy.ask(previous_response_id=first)
        assert (status, body["error"]["message"]) == (400, "max_output_tokens is too large")
        assert {path for path, _ in proxy.vllm.asked} == {CHAT}
        assert "return_token_ids" not in proxy.vllm.asked[-1][1]  # it may have been refused for what we ask for on top
        calls = await proxy.calls()
        assert [call["status"] for call in calls] == ["ok", "error"]


async def test_a_request_that_goes_on_is_answered_also_where_token_ids_are_refused(tmp_path: Path) -> None:
    class OtherVllm(PlayedVllm):
        async def _chat(self, request: web.Request) -> web.StreamResponse:
            self.refusal = (400, TOO_LONG) if "return_token_ids" in await request.json() and self.asked else None
            return await super()._chat(request)

    async with served(tmp_path, OtherVllm()) as proxy:
        first = await proxy.respond()
        status, body = await proxy.ask(previous_response_id=first)
        assert (status, body["object"], body["output"][0]["content"][0]["text"]) == (200, "response", "3 messages")


async def test_a_fallback_that_does_not_know_the_response_is_asked_with_the_whole_conversation(tmp_path: Path) -> None:
    fallback = PlayedVllm()
    async with served(tmp_path, PlayedVllm(), fallback=fallback) as proxy:
        first = await proxy.respond()
        proxy.vllm.refusal = 503, {"error": {"message": "full", "type": "x", "code": 503}}
        second = await proxy.respond(previous_response_id=first)
        (asked,) = fallback.asked
        assert (asked[0], asked[1]["model"], len(asked[1]["messages"])) == (CHAT, "theirs", 3)
        assert "return_token_ids" not in asked[1]
        proxy.vllm.refusal = None
        await proxy.respond(previous_response_id=second)
        assert len(proxy.vllm.asked[-1][1]["messages"]) == 5
        assert [call["trainable"] for call in await proxy.calls()] == [True, False, True]


async def test_another_model_goes_on_with_a_response_of_the_policys(tmp_path: Path) -> None:
    fallback = PlayedVllm()
    async with served(tmp_path, PlayedVllm(), fallback=fallback) as proxy:
        first = await proxy.respond()
        second = await proxy.respond(model="theirs", previous_response_id=first)
        await proxy.respond(model="theirs", previous_response_id=second)
        assert [(path, len(body["messages"])) for path, body in fallback.asked] == [(CHAT, 3), (CHAT, 5)]
        assert (await proxy.ask(model="theirs", previous_response_id="their_own")) == (404, UNKNOWN)
        assert fallback.asked[-1][0] == RESPONSES


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("refusal", [(503, {"detail": "no worker"}), (429, {"error": "slow down"}), (502, {})])
async def test_an_error_in_no_shape_of_vllms_reaches_the_agent_as_it_is(
    tmp_path: Path, path: str, refusal: tuple[int, Json]
) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        proxy.vllm.refusal = refusal
        messages = [{"role": "user", "content": "hi"}]
        assert await proxy.ask(path, **({"messages": messages} if path == MESSAGES else {})) == refusal


async def test_what_only_another_route_could_do_is_refused_with_the_reason_where_that_does_not_know_the_response(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        first = await proxy.respond()
        status, body = await proxy.ask(previous_response_id=first, background=True)
        assert status == 400 and "background is only known to the Responses route" in body["error"]["message"]
        assert body["error"]["param"] == "previous_response_id"
        assert len(proxy.vllm.asked) == 1
    async with served(tmp_path, PlayedVllm()) as proxy:
        assert (await proxy.ask(previous_response_id=first, background=True))[0] == 400


async def test_what_is_redacted_in_the_record_is_not_so_for_the_model(tmp_path: Path) -> None:
    redact = RedactConfig(patterns=["secret-[0-9]+"])
    async with served(tmp_path, PlayedVllm(), redact) as proxy:
        first = await proxy.respond(input="It is secret-1.")
        await proxy.respond(previous_response_id=first, input="What is it?")
        assert proxy.vllm.asked[-1][1]["messages"][0] == {"role": "user", "content": "It is secret-1."}
        assert "secret-1" not in json.dumps(await proxy.calls())
    async with served(tmp_path, PlayedVllm(), redact) as proxy:  # which knows it from the record only
        status, body = await proxy.ask(previous_response_id=first, input="What is it?")
        assert (status, body) == (404, UNKNOWN)
        assert proxy.vllm.asked[-1][0] == RESPONSES


async def test_a_conversation_with_nothing_to_redact_goes_on_after_a_restart(tmp_path: Path) -> None:
    redact = RedactConfig(patterns=["secret-[0-9]+"])
    async with served(tmp_path, PlayedVllm(), redact) as proxy:
        second = await proxy.respond(previous_response_id=await proxy.respond())
        hidden = await proxy.respond(previous_response_id=second, input="It is secret-1.")
    async with served(tmp_path, PlayedVllm(), redact) as proxy:
        await proxy.respond(previous_response_id=second)
        assert len(proxy.vllm.asked[-1][1]["messages"]) == 5
        assert (await proxy.ask(previous_response_id=hidden))[0] == 404


async def test_a_conversation_by_ids_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        first = await proxy.respond()
        second = await proxy.respond(previous_response_id=first)
    async with served(tmp_path, PlayedVllm()) as proxy:
        third = await proxy.respond(previous_response_id=second)
        await proxy.respond(previous_response_id=first)
        await proxy.respond(previous_response_id=third)
        assert [len(body["messages"]) for _, body in proxy.vllm.asked] == [5, 3, 7]


async def test_what_was_said_is_read_from_the_store_once_and_kept_in_limited_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    of = Calls.of

    async def counted(self: Calls, rollout_id: str) -> Any:
        read.append(rollout_id)
        return await of(self, rollout_id)

    monkeypatch.setattr(Calls, "of", counted)
    async with served(tmp_path, PlayedVllm()) as proxy:
        last = await proxy.respond()
        for _ in range(5):
            last = await proxy.respond(previous_response_id=last)
        assert read == []
    async with served(tmp_path, PlayedVllm()) as proxy:
        for _ in range(3):
            last = await proxy.respond(previous_response_id=last)
        assert read == ["r"]
        async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/store.db")) as database:
            small = Earlier(Store(database), memory=100)
            assert [len(await small.up_to("r", last)) for _ in range(2)] == [9, 9]
        assert read == ["r"] * 3


async def test_messages_go_on_with_no_response(tmp_path: Path) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        said = {"messages": [{"role": "user", "content": "hi"}], "previous_response_id": "resp_1"}
        assert (await proxy.ask(MESSAGES, **said))[0] == 200


async def test_a_deleted_rollout_is_not_gone_on_with(tmp_path: Path) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        first = await proxy.respond()
        await proxy.delete()
        status, body = await proxy.ask(previous_response_id=first)
        assert (status, body["error"]["param"]) == (404, "previous_response_id")


async def test_a_stream_that_breaks_is_seen_as_broken_and_recorded_as_an_error(tmp_path: Path) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        proxy.vllm.breaks = True
        asked = {"model": "policy", "input": "hi", "stream": True}
        async with proxy.session.post("/rollouts/r/v1/responses", json=asked) as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        (call,) = await proxy.calls()
        assert (call["status"], call["trainable"]) == ("error", False)
        assert call["response"]["status"] == "in_progress"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "stream", [b"data: [DONE]\n\n", b'data: {"choices": [5]}\n\n', b"data: {}\n\ndata: [DONE]\n\n"]
)
async def test_a_stream_that_is_no_chat_is_broken_off_and_is_no_fault_of_the_proxys(
    tmp_path: Path, path: str, stream: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, PlayedVllm()) as proxy:
        proxy.vllm.stream = stream
        asked = {"model": "policy", "stream": True, **ASKED[path]}
        asked |= {"messages": [{"role": "user", "content": "hi"}]} if path == MESSAGES else {}
        async with proxy.session.post(f"/rollouts/r/v1/{path}", json=asked) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        (call,) = await proxy.calls()
        assert call["status"] == "error" and "no chat completion" in call["error"]
        assert "internal error" not in caplog.text
