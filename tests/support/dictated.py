"""A real vLLM that says what the calculator would say: every token is sampled by vLLM, and none other is allowed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from traffic.server import serving

from support.calculator import Json, key_of, say


class Dictated:
    """Forwards everything to vLLM; keeps what it was asked, by the credential that came with it."""

    def __init__(self, vllm: str, session: aiohttp.ClientSession) -> None:
        self.asked: dict[str | None, list[Json]] = defaultdict(list)
        self._vllm, self._session = vllm, session

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/v1/chat/completions":
            asked = json.loads(body)
            self.asked[key_of(request)].append(asked)
            body = json.dumps(dictated(asked)).encode()
        headers = {"Content-Type": request.content_type}
        url = self._vllm + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")}
            )
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
        return response


def dictated(request: Json) -> Json:
    """With one text only that vLLM may answer. Of a strict tool it would allow every call that fits the schema."""
    tools = [tool | {"function": tool["function"] | {"strict": False}} for tool in request.get("tools") or ()]
    return request | {"structured_outputs": {"choice": [text_for(request)]}} | ({"tools": tools} if tools else {})


def text_for(request: Json) -> str:
    """The answer as the model writes it, tool calls in the form that vLLM's hermes parser reads."""
    said = say(request)
    calls = [{"name": name, "arguments": arguments} for name, arguments in said.calls]
    return said.text or "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


@asynccontextmanager
async def dictating(vllm: str) -> AsyncIterator[tuple[Dictated, str]]:
    """With its root URL."""
    async with aiohttp.ClientSession() as session:
        model = Dictated(vllm, session)
        application = web.Application(client_max_size=64 * 2**20)
        application.router.add_route("*", "/{path:.*}", model.forward)
        async with serving(application) as url:
            yield model, url
