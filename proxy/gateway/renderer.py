"""Asks vLLM's `/v1/chat/completions/render` for the tokens that its chat template makes of messages."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from ...core.config.upstreams import UpstreamConfig
from ...core.errors import LightningError
from ...core.json_text import dumps
from .attempts import Upstreams
from .turns import AsText, closing
from .upstream import Request

log = logging.getLogger(__name__)
Json = dict[str, Any]

CLOSINGS = 1000  # ways to render, at most
RENDER = "/v1/chat/completions/render"
NO_ROUTE = (
    "upstream %s has no %s: start it with `lightning-proxy vllm`, or add --enable-scale-out; until then calls go as "
    "text, and a rollout may become several training rows"
)


class Renderer:
    """Asks the server that answers the call, because its template may differ from the model's own."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._closings: dict[str, list[int]] = {}
        self._warned: set[str] = set()

    async def tokens(self, upstream: UpstreamConfig, request: Request, body: bytes) -> list[int]:
        """Return the tokens that vLLM makes of the messages of a chat request's body; raise AsText.

        `request`: a request of the agent's, for its credentials.
        """
        render_request = request._replace(path=RENDER, query=b"", sent=None).with_body(body)
        try:
            answer = await self._upstreams.open(upstream, render_request)
            try:
                raw = await answer.read()
            finally:
                answer.release()
        except LightningError:
            raise AsText("refused") from None  # the call itself will meet it too, and say so
        if answer.status in (403, 404, 405, 501):
            if upstream.name not in self._warned:
                self._warned.add(upstream.name)
                log.warning(NO_ROUTE, upstream.name, RENDER)
            raise AsText("unavailable")
        return _token_ids(raw)

    async def closing(self, upstream: UpstreamConfig, request: Request, sent: Json) -> list[int]:
        """Return the tokens that the template puts after an answer. Ask once per way to render; raise AsText."""
        options = {"chat_template_kwargs": sent.get("chat_template_kwargs")}
        key = f"{upstream.name} {dumps(options)}"
        if key not in self._closings:
            if len(self._closings) >= CLOSINGS:
                self._closings.clear()
            bodies = (dumps(options | {"model": sent.get("model")} | _answered(text)).encode() for text in ("0", "1"))
            self._closings[key] = closing(*await asyncio.gather(*(self.tokens(upstream, request, b) for b in bodies)))
        return self._closings[key]


def _answered(text: str) -> Json:
    messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": text}]
    return {"messages": messages, "add_generation_prompt": False}


def _token_ids(raw: bytes) -> list[int]:
    try:
        ids = orjson.loads(raw)["token_ids"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        raise AsText("refused") from None
    if not ids or not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise AsText("refused")
    return ids
