"""Gets a request answered: writes it for an upstream, sends it, retries, and moves on to fallbacks."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
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
from ..dialects.as_chat.translation import PATH, Translator
from ..dialects.stream import Dialect, Injection
from .upstream import Answer, HttpUpstream, NoConnection, Request, Route, Upstream

log = logging.getLogger(__name__)

JOIN_TRIES, JOIN_S = 20, 0.5  # while a router's new server does not have the version yet; s between two tries
_RETRIED = frozenset({429, 502, 503, 504, 529})
_FORM_NAME = b'name="model"\r\n'
# The form field's other headers, its value, and the boundary that ends it.
_FORM_VALUE = re.compile(rb"(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--")


class Target(NamedTuple):
    """Where an attempt goes, and the request that it sends. `translated`: whether the request was made a chat."""

    route: Route
    request: Request
    sent: dict[str, Any]
    injection: Injection
    translated: bool = False


@dataclass(eq=False)
class Attempts:
    """Gets a request answered: `async with attempts as answer`. `target` is the current or last attempt."""

    upstreams: Upstreams
    first: Route
    request: Request
    body: dict[str, Any]
    dialect: Dialect | None = None  # vLLM gets its additions
    chat: Translator | None = None  # translates the request of another API
    open_first: Callable[[Request], Awaitable[Answer]] | None = None  # sends the first upstream's requests

    def __post_init__(self) -> None:
        self.target = self._target(self.first)

    @property
    def upstream(self) -> UpstreamConfig:
        """Return the upstream that is being called, or that answered."""
        return self.target.route.upstream

    @property
    def fell_back(self) -> bool:
        return self.target.route is not self.first

    async def __aenter__(self) -> Answer:
        """Return the first answer that is neither 429 nor 5xx, or else the last upstream's answer, whatever it is."""
        for following in self.first.fallbacks:
            why = f"upstream {self.upstream.name} is down"
            try:
                if not self.upstreams.health.is_down(self.upstream):
                    self._answer = await self._ask_with_retries()
                    if self._answer.status != 429 and self._answer.status < 500:
                        return self._answer
                    self._answer.release()
                    why = f"upstream {self.upstream.name} answered with HTTP {self._answer.status}"
            except (UpstreamUnreachable, UpstreamTimeout, Unsupported) as error:
                why = error.message
            log.warning("%s; the request goes to upstream %s", why, following.upstream.name)
            self.target = self._target(following)
        self._answer = await self._ask_with_retries()
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        self._answer.release()

    async def _ask_with_retries(self) -> Answer:
        """The target's answer. Retries while a new server lacks the version, and drops additions that are refused."""
        joins, opened = JOIN_TRIES, None if self.fell_back else self.open_first
        opened = opened or partial(self.upstreams.open, self.upstream)
        while True:
            answer, route = await opened(self.target.request), self.target.route
            is_joining = answer.status == 404 and joins and route.upstream.servers and route.version
            if is_joining and (route.model or "").encode() in await answer.read():
                answer.release()
                await asyncio.sleep(JOIN_S)  # a router's new server: it has the version in a moment
                joins -= 1
            elif await self._refuses_additions(answer):
                answer.release()
                self.target = self._target(route, plain=True)
            else:
                return answer

    async def _refuses_additions(self, answer: Answer) -> bool:
        """Whether the upstream may answer differently without our additions to the request."""
        target, status, accepted = self.target, answer.status, self.upstreams.accepted
        attempt = (target.route.upstream.name, target.injection)
        if not target.injection:
            return False
        if status == 200:
            accepted.add(attempt)
        if target.translated:
            return 400 <= status < 500 and status not in _RETRIED
        if status not in (400, 422):
            return False
        return attempt not in accepted or target.injection.is_named_in(await answer.read())

    def _target(self, route: Route, *, plain: bool = False) -> Target:
        """The attempt for a route. `plain`: without additions and, unless a response is continued, untranslated."""
        request, body, chat = self.request._replace(servers=route.servers), self.body, self.chat
        injects, injection = route.upstream.kind == "vllm" and not plain, Injection()
        model = {} if route.model is None else {"model": route.model}
        if chat is not None and (chat.continues or (route is self.first and not plain)):
            sent = chat.request | model
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
    """The request with the body `sent`, in the agent's own bytes where possible. In a form, only `model` changes."""
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
    """All upstreams, each created when first used, and the health of their servers."""

    session: aiohttp.ClientSession
    makers: Mapping[str, Callable[[UpstreamConfig], Upstream]] = field(default_factory=dict)  # by kind
    vouching: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by upstream: the headers that identify us
    accepted: set[tuple[str, Injection]] = field(default_factory=set)  # additions to requests, by upstream
    _opened: dict[str, Upstream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.health = Health(self.session)

    async def open(self, config: UpstreamConfig, request: Request) -> Answer:
        """Return the answer once its headers arrive. Retries up to `retries` times if the upstream is down or busy."""
        if (upstream := self._opened.get(config.name)) is None:
            vouching = self.vouching.get(config.name, {})
            http = partial(HttpUpstream, session=self.session, health=self.health, vouching=vouching)
            upstream = self._opened[config.name] = self.makers.get(config.kind, http)(config)
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

    async def ask(self, config: UpstreamConfig, request: Request) -> tuple[int, bytes]:
        answer = await self.open(config, request)
        try:
            return answer.status, await answer.read()
        finally:
            answer.release()

    async def close(self) -> None:
        for upstream in self._opened.values():
            await upstream.close()


def _retry_after_s(answer: Answer) -> float | None:
    """The seconds that Retry-After asks for, as a number or a date; None if the header is missing or invalid."""
    at = answer.retry_after
    with suppress(ValueError):
        return float(at) if at.isdecimal() else max(parsedate_to_datetime(at).timestamp() - time.time(), 0.0)
    return None


def is_form(body: bytes) -> bool:
    """Return whether a body begins like multipart/form-data, in which audio and images are sent."""
    return body.startswith(b"--")


def form_model(body: bytes) -> re.Match[bytes] | None:
    """Return a match of a form's field `model`, with its value as group 1; None if there is no such field."""
    at = body.find(_FORM_NAME)
    return None if at < 0 else _FORM_VALUE.match(body, at + len(_FORM_NAME))
