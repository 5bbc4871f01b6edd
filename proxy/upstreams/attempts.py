"""Tries to get a call answered: opens its upstream on first use, retries, and moves on to fallbacks."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp

from ..apis.inject import Injection
from ..config.upstreams import UpstreamConfig
from ..errors import Unsupported, UpstreamTimeout, UpstreamUnreachable
from .base import Answer, NoConnection, ReadAnswer, Request, Route, Upstream
from .health import Health
from .http import HttpUpstream

log = logging.getLogger(__name__)

_REFUSALS = frozenset({400, 422})
JOIN_TRIES, JOIN_S = 20, 0.5
_RETRIED = frozenset({429, 502, 503, 504, 529})


class Upstreams:
    """All upstreams, each made when first used.

    `health` says which servers not to ask; `makers` make upstreams of kinds that do not speak plain HTTP. `vouching`:
    by the upstream's name, headers that tell it that a request comes through the proxy.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        health: Health | None = None,
        makers: Mapping[str, Callable[[UpstreamConfig], Upstream]] | None = None,
        vouching: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.health = health or Health()
        self._session = session
        self._makers = makers or {}
        self._vouching = vouching or {}
        self._opened: dict[str, Upstream] = {}
        self.taken: set[tuple[str, Injection]] = set()  # what an upstream was asked for on top, and answered

    async def open(self, config: UpstreamConfig, request: Request) -> Answer:
        """Return the upstream's answer up to its headers, after retries. Errors are those of `Upstream.open`."""
        upstream = self._opened.get(config.name) or self._make(config)
        if not config.retries:
            return await upstream.open(request)
        return await _open_with_retries(config, upstream, request)

    async def close(self) -> None:
        for upstream in self._opened.values():
            await upstream.close()

    def _make(self, config: UpstreamConfig) -> Upstream:
        make = self._makers.get(config.kind)
        if make is not None:
            made = make(config)
        else:
            made = HttpUpstream(config, self._session, self.health, self._vouching.get(config.name, {}))
        self._opened[config.name] = made
        return made


class Target(NamedTuple):
    """One way to get a call answered: the upstream of this route and the form of the request. `sent` is its body.

    `translated`: the request is in another API than the agent's, which reads the answer, too.
    """

    route: Route
    request: Request
    sent: dict[str, Any]
    injection: Injection
    translated: bool = False

    @property
    def model(self) -> str | None:
        model = self.sent.get("model")
        return model if isinstance(model, str) else None


class Attempts:
    """One call's ways to an answer, tried in order until one is answered: `async with attempts as answer`.

    `target` is the one that is under way, or that answered. `ask` makes a target when its turn has come; its second
    argument asks for a plain one, without any injection.
    """

    def __init__(self, upstreams: Upstreams, route: Route, ask: Callable[[Route, bool], Target]) -> None:
        self._upstreams = upstreams
        self._ask = ask
        self._left = list(route.fallbacks)
        self._first = route
        self._open_first: Callable[[Request], Awaitable[Answer]] | None = None
        self._answer: Answer | None = None
        self.target = ask(route, False)

    def begin_with(self, open_first: Callable[[Request], Awaitable[Answer]]) -> None:
        """Ask the first upstream with this function."""
        self._open_first = open_first

    @property
    def upstream(self) -> UpstreamConfig:
        """Return the upstream that the call is at, or that answered it."""
        return self.target.route.upstream

    @property
    def fell_back(self) -> bool:
        return self.target.route is not self._first

    async def __aenter__(self) -> Answer:
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
                    self._answer = answer
                    return answer
                answer.release()

    async def __aexit__(self, *_: object) -> None:
        assert self._answer is not None
        self._answer.release()

    async def _open(self) -> Answer:
        answer = await self._send()
        for _ in range(JOIN_TRIES):
            if not self._may_have_joined(answer.status):
                break
            refusal = await answer.read()
            if (self.target.route.model or "").encode() not in refusal:
                answer = ReadAnswer(answer, refusal)  # something else is missing
                break
            answer.release()
            await asyncio.sleep(JOIN_S)
            answer = await self._send()
        if not self.target.injection:
            return answer
        asked = self.upstream.name, self.target.injection
        if answer.status == 200:
            self._upstreams.taken.add(asked)
        elif self._may_be_ours(answer.status):
            # Perhaps for what is asked for on top; if not, the agent is told of its own request.
            refusal = await answer.read()
            known = asked in self._upstreams.taken and not self.target.translated
            if known and not self.target.injection.is_named_in(refusal):
                return ReadAnswer(answer, refusal)
            answer.release()
            self.target = self._ask(self.target.route, True)
            answer = await self._send()
        return answer

    def _may_have_joined(self, status: int) -> bool:
        """Whether a router may have asked a server that has just come up. It has the version within a moment."""
        return status == 404 and bool(self.upstream.servers) and bool(self.target.route.version)

    def _may_be_ours(self, status: int) -> bool:
        """Whether the agent's own request might be answered otherwise, or in other words."""
        return status in _REFUSALS or (self.target.translated and 400 <= status < 500 and status not in _RETRIED)

    async def _send(self) -> Answer:
        if self._open_first is not None and not self.fell_back:
            return await self._open_first(self.target.request)
        return await self._upstreams.open(self.upstream, self.target.request)

    def _has_next(self, reason: str) -> bool:
        if not self._left:
            return False
        following = self._left.pop(0)
        log.warning("upstream %s: %s; %s gets the call", self.upstream.name, reason, following.upstream.name)
        self.target = self._ask(following, False)
        return True


async def _open_with_retries(config: UpstreamConfig, upstream: Upstream, request: Request) -> Answer:
    """`upstream.open`, as often as `retries` says; its last answer or error if none is a good one.

    An answer whose Retry-After asks for more than `retry_wait_s` is the last.
    """
    for tried in range(config.retries):
        wait = None
        try:
            answer = await upstream.open(request)
        except NoConnection:
            pass
        else:
            wait = _asked_wait(answer)
            if answer.status not in _RETRIED or (wait or 0.0) > config.retry_wait_s:
                return answer
            answer.release()
        await asyncio.sleep(random.uniform(0, min(0.5 * 2**tried, config.retry_wait_s)) if wait is None else wait)
    return await upstream.open(request)


def _asked_wait(answer: Answer) -> float | None:
    """The seconds that Retry-After asks for, as a number or a date; None if it cannot be read."""
    value = answer.retry_after
    if value.isdecimal():
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
