"""Learns, once for each server, how its own route for Messages applies its chat template."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ...core.errors import LightningError
from ...core.json_text import encode, loads
from ..dialects.as_chat.translation import PROBES, Template, learn
from .attempts import Upstreams
from .upstream import Request, Route

log = logging.getLogger(__name__)
Json = dict[str, Any]

_NOT_NOW = frozenset({401, 403, 429})  # it did not let this request in; it may the next one


class Templates:
    """Knows the templates of the servers that were probed. One that could not answer is probed again."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._known: dict[str, Template] = {}
        self._asking: dict[str, asyncio.Task[Template]] = {}

    def of(self, upstream: str | None) -> Template:
        """Return what is known of an upstream's template."""
        return self._known.get(upstream or "", Template())

    async def learned(self, route: Route, request: Request) -> Template:
        """Return a server's template; probe it with the credentials of the first request that needs it."""
        name = route.upstream.name
        if name in self._known:
            return self._known[name]
        if name not in self._asking:
            asking = self._asking[name] = asyncio.create_task(self._learned(route, request))
            asking.add_done_callback(lambda _: self._asking.pop(name))
        return await asyncio.shield(self._asking[name])

    async def _learned(self, route: Route, request: Request) -> Template:
        name = route.upstream.name
        probes = (self._ask(route, request, path, body | {"model": route.model}) for path, body in PROBES.values())
        try:
            answers = await asyncio.gather(*probes)
        except LightningError as error:  # the call itself will meet it, too
            log.info("upstream %s: its chat template is not known: %s", name, error.message)
            return Template()
        if any(status in _NOT_NOW or status >= 500 for status, _ in answers):
            return Template()
        self._known[name] = learn(dict(zip(PROBES, answers, strict=True)))
        return self._known[name]

    async def _ask(self, route: Route, request: Request, path: str, body: Json) -> tuple[int, Any]:
        probe = request._replace(method="POST", path=path, query=b"", body=encode(body))
        answer = await self._upstreams.open(route.upstream, probe)
        try:
            raw = await answer.read()
        finally:
            answer.release()
        try:
            read = loads(raw)
        except ValueError:
            read = None
        return answer.status, read if isinstance(read, dict) else {}
