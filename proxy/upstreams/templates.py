"""Asks a server, once, what its chat template makes of requests for Messages."""

from __future__ import annotations

import asyncio
from typing import Any

from ..apis.as_chat.template import PROBES, Template, learn
from ..config.upstreams import UpstreamConfig
from ..errors import LightningError
from ..json_text import encode, loads
from .attempts import Upstreams
from .base import Request


class Templates:
    """Keeps what was learnt of each upstream's template."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._known: dict[str, Template] = {}

    async def of(self, upstream: UpstreamConfig, request: Request, model: str | None) -> Template:
        """Return what is known of an upstream's template; nothing while the server does not say.

        `request`: one of the agent's, for its credentials. `model`: a name that the server knows.
        """
        if upstream.name not in self._known:
            asked = (self._ask(upstream, request, path, body | {"model": model}) for path, body in PROBES.values())
            template = learn(dict(zip(PROBES, await asyncio.gather(*asked), strict=True)))
            if template == Template():
                return template
            self._known[upstream.name] = template
        return self._known[upstream.name]

    async def _ask(self, upstream: UpstreamConfig, request: Request, path: str, body: Any) -> tuple[int, Any]:
        try:
            answer = await self._upstreams.open(upstream, request._replace(path=path, query=b"", body=encode(body)))
            try:
                return answer.status, loads(await answer.read())
            finally:
                answer.release()
        except (LightningError, ValueError):
            return 0, None  # the call itself will meet it too, and say so
