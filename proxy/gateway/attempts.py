"""Tries to get a call answered: writes its request for the upstream, opens that, retries, and moves on to fallbacks."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import orjson

from ...core.config.upstreams import UpstreamConfig
from ...core.errors import Unsupported, UpstreamTimeout, UpstreamUnreachable
from ...core.json_text import encode, with_model
from ...serving.health import Health
from ..dialects.as_chat.dialect import PATH, ThroughChat
from ..dialects.stream import Dialect, Injection
from .upstream import Answer, HttpUpstream, NoConnection, Request, Route, Upstream

log = logging.getLogger(__name__)

_REFUSALS = frozenset({400, 422})
JOIN_TRIES, JOIN_S = 20, 0.5
_RETRIED = frozenset({429, 502, 503, 504, 529})
_FORM_NAME = b'name="model"\r\n'
# The form field's other headers, its value, and the boundary that ends it.
_FORM_VALUE = re.compile(rb"(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--")


class Target(NamedTuple):
    """One attempt to get a call answered: the upstream of this route and the request as sent; `sent` is its body.

    `translated`: the request is in another API than the agent's, which reads the answer, too.
    """

    route: Route
    request: Request
    sent: dict[str, Any]
    injection: Injection
    translated: bool = False


@dataclass(eq=False)
class Attempts:
    """The attempts to get a call answered, in one loop: `async with attempts as answer`.

    An upstream is asked with our additions to the request; without them, if it refuses because of them; again, while a
    server that has just come up lacks the version; then each of the route's fallbacks is. `Upstreams.open`, by which
    they are asked, asks again as `retries` says.

    `target` is the one that is under way, or that answered. For vLLM it has the additions of `dialect`. `chat` stands
    for the request of another API. `open_first` sends the first upstream's requests.
    """

    upstreams: Upstreams
    first: Route
    request: Request
    body: dict[str, Any]
    dialect: Dialect | None = None
    chat: ThroughChat | None = None
    open_first: Callable[[Request], Awaitable[Answer]] | None = None

    def __post_init__(self) -> None:
        self._left, self._joins = list(self.first.fallbacks), JOIN_TRIES
        self.target = self._target(self.first)

    @property
    def upstream(self) -> UpstreamConfig:
        """Return the upstream that the call is at, or that answered it."""
        return self.target.route.upstream

    @property
    def fell_back(self) -> bool:
        return self.target.route is not self.first

    async def __aenter__(self) -> Answer:
        """The first answer that is neither 429 nor a server's error; the last upstream's, or its error, if none is."""
        while True:
            route, request = self.target.route, self.target.request
            if route.fallbacks and self.upstreams.health.is_down(route.upstream) and self._fall_back("it is down"):
                continue
            try:
                if self.open_first is not None and not self.fell_back:
                    answer = await self.open_first(request)
                else:
                    answer = await self.upstreams.open(route.upstream, request)
                again = await self._is_asked_again(answer)
            except (UpstreamUnreachable, UpstreamTimeout, Unsupported) as error:
                if not self._fall_back(error.message):
                    raise
                continue
            is_busy = answer.status == 429 or answer.status >= 500
            if not again and not (is_busy and self._fall_back(f"it answered {answer.status}")):
                self._answer = answer
                return answer
            answer.release()

    async def __aexit__(self, *_: object) -> None:
        self._answer.release()

    def _fall_back(self, reason: str) -> bool:
        """Whether there is another upstream: it is the target now."""
        if not self._left:
            return False
        following = self._left.pop(0)
        log.warning("upstream %s: %s; %s gets the call", self.upstream.name, reason, following.upstream.name)
        self.target = self._target(following)
        return True

    async def _is_asked_again(self, answer: Answer) -> bool:
        """Whether this upstream is asked again, perhaps with the agent's own request, which is the target then."""
        target, status = self.target, answer.status
        route, injection = target.route, target.injection
        if status == 404 and self._joins and route.upstream.servers and route.version:
            self._joins -= 1
            if (route.model or "").encode() in await answer.read():  # a router's new server: it has it in a moment
                answer.release()
                await asyncio.sleep(JOIN_S)
                return True
        if not injection:
            return False
        attempt, accepted = (route.upstream.name, injection), self.upstreams.accepted
        if status == 200:
            accepted.add(attempt)
        if status not in _REFUSALS and not (target.translated and 400 <= status < 500 and status not in _RETRIED):
            return False
        refusal = await answer.read()
        if attempt in accepted and not target.translated and not injection.is_named_in(refusal):
            return False
        self.target = self._target(route, plain=True)
        return True

    def _target(self, route: Route, *, plain: bool = False) -> Target:
        """The request for this upstream; a `plain` one is the agent's own, without any injection."""
        request, body, chat = self.request, self.body, self.chat
        injects, injection = route.upstream.kind == "vllm" and not plain, Injection()
        model = {} if route.model is None else {"model": route.model}
        if route.servers:
            request = request._replace(servers=route.servers)
        if chat is not None and (chat.continues or (route is self.first and not plain)):
            sent = chat.chat | model
            if injects:
                sent, injection = chat.inject(sent)
            request = request._replace(path=PATH, query=b"", body=encode(sent))
            return Target(route, request, sent, injection, translated=True)
        sent = body
        if model and isinstance(body.get("model"), str | None):  # the upstream refuses other types
            sent = body | model
        if self.dialect is not None and injects:
            sent, injection = self.dialect.inject(sent)
            if route.adds_usage:
                injection = injection._replace(usage=False)  # the chunk is not ours to take out
        return Target(route, _with_body(request, body, sent), sent, injection)


def _with_body(request: Request, body: dict[str, Any], sent: dict[str, Any]) -> Request:
    """The request with `sent` for its body, in the agent's own bytes where possible, with what was added at their end.

    So numbers keep their digits, and nothing is lost that a parser would lose.
    """
    changed = {name: value for name, value in sent.items() if name not in body or body[name] is not value}
    if not changed:
        return request
    if is_form(request.body):
        if (match := form_model(request.body)) is None:
            return request
        return request.with_body(request.body[: match.start(1)], sent["model"].encode(), request.body[match.end(1) :])
    if "model" in changed and "model" in body:
        if (own := with_model(request.body.rstrip(), changed.pop("model"))) is None:
            return request.with_body(encode(sent))
        request = request.with_body(*own)
    if not body or not changed.keys().isdisjoint(body):
        return request.with_body(encode(sent))
    return request.with_members(orjson.dumps(changed)) if changed else request


@dataclass(eq=False)
class Upstreams:
    """All upstreams, each made when first used.

    `health` knows which servers to leave out; `makers` make upstreams of kinds that do not speak plain HTTP.
    `vouching`: by the upstream's name, headers that show it that a request comes through the proxy.
    """

    session: aiohttp.ClientSession
    makers: Mapping[str, Callable[[UpstreamConfig], Upstream]] = field(default_factory=dict)
    vouching: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    accepted: set[tuple[str, Injection]] = field(default_factory=set)  # additions to requests, by upstream
    _opened: dict[str, Upstream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.health = Health(self.session)

    async def open(self, config: UpstreamConfig, request: Request) -> Answer:
        """Return the upstream's answer up to its headers. Errors are those of `Upstream.open`.

        It is asked again, `retries` times at most, where it did not get the request or answered that it is busy. An
        answer whose Retry-After asks for more than `retry_wait_s` is the last.
        """
        upstream = self._opened.get(config.name) or self._make(config)
        for tried in range(config.retries):
            wait = None
            try:
                answer = await upstream.open(request)
                if answer.status not in _RETRIED:
                    return answer
                wait = _retry_after_s(answer)
                if (wait or 0.0) > config.retry_wait_s:
                    return answer
                answer.release()
            except NoConnection:
                pass
            await asyncio.sleep(random.uniform(0, min(0.5 * 2**tried, config.retry_wait_s)) if wait is None else wait)
        return await upstream.open(request)

    async def close(self) -> None:
        for upstream in self._opened.values():
            await upstream.close()

    def _make(self, config: UpstreamConfig) -> Upstream:
        vouching = self.vouching.get(config.name, {})
        http = partial(HttpUpstream, session=self.session, health=self.health, vouching=vouching)
        made = self._opened[config.name] = self.makers.get(config.kind, http)(config)
        return made


def _retry_after_s(answer: Answer) -> float | None:
    """The seconds that Retry-After asks for, as a number or a date; None if it cannot be read."""
    value = answer.retry_after
    if value.isdecimal():
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def is_form(body: bytes) -> bool:
    """Return whether a body begins as multipart/form-data does, in which sound and pictures are sent."""
    return body.startswith(b"--")


def form_model(body: bytes) -> re.Match[bytes] | None:
    """Return where a form's field `model` has its value, as group 1."""
    at = body.find(_FORM_NAME)
    return None if at < 0 else _FORM_VALUE.match(body, at + len(_FORM_NAME))
