"""How calls were sampled, as a vLLM over HTTP says it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from contract.system import listening
from contract.vllm import PlayedVllm
from lightning_proxy.core.errors import UpstreamUnreachable
from lightning_proxy.core.records import ModelCall
from lightning_proxy.proxy.dialects.as_chat.recorded import as_chat
from lightning_proxy.serving.vllm import VllmServer, operator_session
from lightning_proxy.trainer.collect.sampled import Sampled
from lightning_proxy.trainer.types import Sampling
from support.calls import call

CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}


class RenderingServer(PlayedVllm):
    """Says how it samples: as it is asked, and else by its own defaults."""

    def __init__(self, defaults: dict[str, Any], **more: Any) -> None:
        super().__init__(Path("base"))
        self.defaults, self.more = defaults, more

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        shown = {"structured_outputs", "temperature", "top_p"} & body.keys()
        parameters = self.defaults | {name: body[name] for name in shown}
        return web.json_response({"token_ids": [1], "sampling_params": parameters, **self.more})


@asynccontextmanager
async def asked_of(server: RenderingServer) -> AsyncIterator[Sampled]:
    async with listening(server.app) as url, operator_session() as session:
        yield Sampled(VllmServer(session, f"{url}/v1", {}), as_chat)


def asking(**request: Any) -> ModelCall:
    return call("c", request=request)


async def test_the_servers_own_defaults_count_where_the_request_is_silent() -> None:
    server = RenderingServer({"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05})
    async with asked_of(server) as sampled:
        silent, loud = asking(), asking(temperature=0.9, top_p=1.0)
        await sampled.look([silent, loud])
        assert sampled.of(silent) == Sampling(0.6, top_p=0.8, top_k=20, repetition_penalty=1.05)
        assert sampled.of(loud) == Sampling(0.9, top_k=20, repetition_penalty=1.05)


async def test_a_call_for_messages_is_asked_for_as_the_chat_that_it_was_sent_as() -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}]
    asked = {"model": "m", "max_tokens": 5, "messages": said, "tools": [], "thinking": {"type": "disabled"}}
    message = call("c", request=asked, endpoint="messages")
    async with asked_of(RenderingServer({"top_k": 7})) as sampled:  # which renders nothing but chats
        await sampled.look([message])
        assert sampled.of(message) == Sampling(top_k=7)


async def test_a_grammar_is_vllms_own() -> None:
    async with asked_of(RenderingServer({})) as sampled:
        await sampled.look([asking(**CHOICE)])
        found = sampled.of(asking(**CHOICE))
        assert found is not None and found.grammar == '{"choice": ["yes", "no"]}'


async def test_a_grammar_that_cannot_be_replayed_says_why() -> None:
    cases: dict[str, dict[str, Any]] = {
        "reasoning": {"choice": ["a"]},
        "multipleOf": {"json": {"type": "number", "multipleOf": 2}},
        "allOf": {"json": '{"allOf": [{}, {}]}'},
        "format": {"json": {"type": "string", "format": "iban"}},
        "Lark": {"grammar": "start: /a/"},
        "whitespace": {"json": {}, "disable_any_whitespace": True},
    }
    for because, outputs in cases.items():
        more = {"reasoning_ended": False} if because == "reasoning" else {}
        async with asked_of(RenderingServer({}, **more)) as sampled:
            constrained = asking(structured_outputs=outputs)
            await sampled.look([constrained])
            assert sampled.of(constrained) is None and because in str(sampled.why_not(constrained))


async def test_a_grammar_waits_for_a_vllm_that_is_away_and_other_calls_do_not() -> None:
    async with operator_session() as session:
        sampled = Sampled(VllmServer(session, "http://127.0.0.1:9/v1", {}), as_chat)
        await sampled.look([asking(top_p=0.5)])
        assert sampled.of(asking(top_p=0.5)) == Sampling(top_p=0.5)
        with pytest.raises(UpstreamUnreachable):
            await sampled.look([asking(**CHOICE)])
        assert "structured_outputs: only vLLM knows its grammar" in str(sampled.why_not(asking(**CHOICE)))
