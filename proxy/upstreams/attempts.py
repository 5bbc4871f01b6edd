"""The configured upstreams at work: each opened when first used, tried again, and followed by its fallbacks."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import aiohttp

from ..apis.inject import Injection
from ..config.upstreams import UpstreamConfig
from ..errors import Unsupported, UpstreamTimeout, UpstreamUnreachable
from ..gateway.ports import Answer, Route, Upstream
from .health import Health
from .http import HttpUpstream, Request
from .litellm.upstream import LitellmUpstream
from .retries import open_with_retries

log = logging.getLogger(__name__)

_REFUSALS = frozenset({400, 422})


class Upstreams:
    """All upstreams. `health` says which servers not to ask."""

    def __init__(self, session: aiohttp.ClientSession, health: Health | None = None) -> None:
        self.health = health or Health()
        self._session = session
        self._opened: dict[str, Upstream] = {}

    async def open(self, config: UpstreamConfig, request: Request) -> Answer:
        """The upstream's answer as far as its headers, after its retries; errors as those of `Upstream.open`."""
        upstream = self._opened.get(config.name) or self._make(config)
        if not config.retries:
            return await upstream.open(request)
        return await open_with_retries(config, upstream, request)

    async def close(self) -> None:
        for upstream in self._opened.values():
            await upstream.close()

    def _make(self, config: UpstreamConfig) -> Upstream:
        made: Upstream
        made = LitellmUpstream(config) if config.kind == "litellm" else HttpUpstream(config, self._session, self.health)
        self._opened[config.name] = made
        return made


class Target(NamedTuple):
    """One way to have a call answered: by this route's upstream, asked in this way. `sent`: the request's body."""

    route: Route
    request: Request
    sent: dict[str, Any]
    injection: Injection

    @property
    def model(self) -> str | None:
        model = self.sent.get("model")
        return model if isinstance(model, str) else None


class Attempts:
    """One call's ways to an answer, in order; the next one is made and taken when the one before has failed.

    `target` is the one that is under way, or that answered. `ask` makes one; plain: without any injection.
    """

    def __init__(self, upstreams: Upstreams, routes: Iterator[Route], ask: Callable[[Route, bool], Target]) -> None:
        self._upstreams = upstreams
        self._routes = routes
        self._ask = ask
        self._first = next(routes)
        self._open_first: Callable[[Request], Awaitable[Answer]] | None = None
        self.target = ask(self._first, False)

    def begin_with(self, open_first: Callable[[Request], Awaitable[Answer]]) -> None:
        """Ask the first upstream in a way of one's own."""
        self._open_first = open_first

    @property
    def fell_back(self) -> bool:
        return self.target.route is not self._first

    async def open(self) -> Answer:
        """The first answer that is neither 429 nor a server's error; the last upstream's, or its error, if none is."""
        while True:
            route = self.target.route
            if route.fallbacks and self._upstreams.health.is_down(route.upstream) and self._has_next("it is down"):
                continue
            try:
                answer = await self._open()
            except (UpstreamUnreachable, UpstreamTimeout, Unsupported) as error:
                if not self._has_next(error.message):
                    raise
            else:
                status = answer.status
                if status < 429 or 429 < status < 500 or not self._has_next(f"it answered {status}"):
                    return answer
                answer.release()

    async def _open(self) -> Answer:
        answer = await self._send()
        if self.target.injection and answer.status in _REFUSALS:
            # Perhaps for what is asked for on top; if not, the agent is told of its own request.
            answer.release()
            self.target = self._ask(self.target.route, True)
            answer = await self._send()
        return answer

    async def _send(self) -> Answer:
        if self._open_first is not None and not self.fell_back:
            return await self._open_first(self.target.request)
        return await self._upstreams.open(self.target.route.upstream, self.target.request)

    def _has_next(self, reason: str) -> bool:
        following = next(self._routes, None)
        if following is None:
            return False
        before, after = self.target.route.upstream.name, following.upstream.name
        log.warning("upstream %s: %s; %s gets the call", before, reason, after)
        self.target = self._ask(following, False)
        return True
