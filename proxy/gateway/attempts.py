"""Tries to get a call answered: writes its request for the upstream, opens that, retries, and moves on to fallbacks."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from ..dialects.chat import Injection
from ..dialects.dialects import Dialect
from .upstream import Answer, HttpUpstream, NoConnection, Piece, ReadAnswer, Request, Route, Upstream

log = logging.getLogger(__name__)

_REFUSALS = frozenset({400, 422})
JOIN_TRIES, JOIN_S = 20, 0.5
_RETRIED = frozenset({429, 502, 503, 504, 529})


class Attempts:
    """The attempts to get a call answered: `async with attempts as answer`. Each of the four has its function:

    1. `__aenter__` tries the route's upstream, then each of its fallbacks
    2. `_open` tries with our additions to the request, then without, if it is refused because of them
    3. `_send` tries again while a server that has just come up lacks the version
    4. `Upstreams.open` tries again as `retries` says

    `target` is the one that is under way, or that answered. `target_for` makes a target when its turn has come; its
    second argument asks for a plain one, without any injection.
    """

    def __init__(self, upstreams: Upstreams, route: Route, target_for: Callable[[Route, bool], Target]) -> None:
        self._upstreams = upstreams
        self._target_for = target_for
        self._left = list(route.fallbacks)
        self._first = route
        self._open_first: Callable[[Request], Awaitable[Answer]] | None = None
        self._answer: Answer | None = None
        self.target = target_for(route, False)

    def begin_with(self, open_first: Callable[[Request], Awaitable[Answer]]) -> None:
        """Use this function to send the request to the first upstream."""
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
            if route.fallbacks and self._upstreams.health.is_down(route.upstream) and self._fall_back("it is down"):
                continue
            try:
                answer = await self._open()
            except (UpstreamUnreachable, UpstreamTimeout, Unsupported) as error:
                if not self._fall_back(error.message):
                    raise
                continue
            status = answer.status
            if status < 429 or 429 < status < 500 or not self._fall_back(f"it answered {status}"):
                self._answer = answer
                return answer
            answer.release()

    async def __aexit__(self, *_: object) -> None:
        assert self._answer is not None
        self._answer.release()

    def _fall_back(self, reason: str) -> bool:
        """Whether there is another upstream: it is the target now."""
        if not self._left:
            return False
        following = self._left.pop(0)
        log.warning("upstream %s: %s; %s gets the call", self.upstream.name, reason, following.upstream.name)
        self.target = self._target_for(following, False)
        return True

    async def _open(self) -> Answer:
        """The upstream's answer, to the agent's own request where our additions may be why it is refused."""
        answer, target = await self._send(), self.target
        if not target.injection:
            return answer
        attempt, status = (self.upstream.name, target.injection), answer.status
        if status == 200:
            self._upstreams.accepted.add(attempt)
        refused = status in _REFUSALS or (target.translated and 400 <= status < 500 and status not in _RETRIED)
        if not refused:
            return answer
        refusal, accepted = await answer.read(), attempt in self._upstreams.accepted and not target.translated
        if accepted and not target.injection.is_named_in(refusal):
            return ReadAnswer(answer, refusal)
        answer.release()
        self.target = self._target_for(target.route, True)
        return await self._send()

    async def _send(self) -> Answer:
        """The answer to the target's request. A router may have chosen a new server: it has the version in a moment."""
        route, request = self.target.route, self.target.request
        send = None if self.fell_back else self._open_first
        send = send or partial(self._upstreams.open, route.upstream)
        for _ in range(JOIN_TRIES):
            answer = await send(request)
            if answer.status != 404 or not route.upstream.servers or not route.version:
                return answer
            refusal = await answer.read()
            if (route.model or "").encode() not in refusal:
                return ReadAnswer(answer, refusal)  # something else is missing
            answer.release()
            await asyncio.sleep(JOIN_S)
        return await send(request)


class Upstreams:
    """All upstreams, each made when first used.

    `health` knows which servers to leave out; `makers` make upstreams of kinds that do not speak plain HTTP.
    `vouching`: by the upstream's name, headers that show it that a request comes through the proxy.
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
        self.accepted: set[tuple[str, Injection]] = set()  # additions to requests, by upstream

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
            except NoConnection:
                pass
            else:
                wait = _retry_after_s(answer)
                if answer.status not in _RETRIED or (wait or 0.0) > config.retry_wait_s:
                    return answer
                answer.release()
            await asyncio.sleep(random.uniform(0, min(0.5 * 2**tried, config.retry_wait_s)) if wait is None else wait)
        return await upstream.open(request)

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


def _retry_after_s(answer: Answer) -> float | None:
    """The seconds that Retry-After asks for, as a number or a date; None if it cannot be read."""
    value = answer.retry_after
    if value.isdecimal():
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


class Target(NamedTuple):
    """One attempt to get a call answered: the upstream of this route and the request as sent; `sent` is its body.

    `translated`: the request is in another API than the agent's, which reads the answer, too.
    """

    route: Route
    request: Request
    sent: dict[str, Any]
    injection: Injection
    translated: bool = False


_FORM_NAME = b'name="model"\r\n'
# The form field's other headers, its value, and the boundary that ends it.
_FORM_VALUE = re.compile(rb"(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--")


def chat_target(request: Request, chat: ThroughChat, route: Route, plain: bool) -> Target:
    """Return the request for the chat route that stands for one of another API. `plain`: as in `target_of`."""
    sent, injection = chat.chat | ({} if route.model is None else {"model": route.model}), Injection()
    if not plain and route.upstream.kind == "vllm":
        sent, injection = chat.inject(sent)
    chat_request = request._replace(path=PATH, query=b"", body=encode(sent), servers=route.servers)
    return Target(route, chat_request, sent, injection, translated=True)


def target_of(request: Request, body: dict[str, Any], dialect: Dialect | None, route: Route, plain: bool) -> Target:
    """Return the request for this upstream. For vLLM it has the dialect's additions, unless `plain`."""
    sent, injection = body, Injection()
    if route.servers:
        request = request._replace(servers=route.servers)
    if route.model is not None and isinstance(body.get("model"), str | None):  # the upstream refuses other types
        sent = body | {"model": route.model}
    if dialect is not None and not plain and route.upstream.kind == "vllm":
        sent, injection = dialect.inject(sent)
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
        return request.with_body(_with_form_model(request.body, sent["model"]))
    own: tuple[Piece, ...] | None = ()
    if "model" in changed and "model" in body:
        own = with_model(request.body.rstrip(), changed.pop("model"))
    if own is None or not body or not changed.keys().isdisjoint(body):
        return request.with_body(encode(sent))
    request = request.with_body(*own) if own else request
    return request.with_members(orjson.dumps(changed)) if changed else request


def is_form(body: bytes) -> bool:
    """Return whether a body begins as multipart/form-data does, in which sound and pictures are sent."""
    return body.startswith(b"--")


def form_model(body: bytes) -> re.Match[bytes] | None:
    """Return where a form's field `model` has its value, as group 1."""
    at = body.find(_FORM_NAME)
    return None if at < 0 else _FORM_VALUE.match(body, at + len(_FORM_NAME))


def _with_form_model(body: bytes, model: str) -> bytes:
    match = form_model(body)
    return body if match is None else body[: match.start(1)] + model.encode() + body[match.end(1) :]


# What may stand before the first line of a stream, and before JSON: a byte order mark, blanks.
_BEFORE = b"\xef\xbb\xbf \t\r\n"
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class BegunAnswer:
    """An answer whose first bytes were read, which show whether it is a stream."""

    def __init__(self, answer: Answer, first: bytes, rest: AsyncIterator[bytes], *, is_stream: bool) -> None:
        self._first = first
        self._rest = rest
        self.is_stream = is_stream
        self.status = answer.status
        self.retry_after = answer.retry_after
        self.headers = answer.headers
        self.release = answer.release

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._first
        async for piece in self._rest:
            yield piece

    async def read(self) -> bytes:
        return b"".join([self._first, *[piece async for piece in self._rest]])


async def begun(answer: Answer, *, wants_stream: bool) -> Answer:
    """Return the answer when it is known whether it is a stream. Errors are those of `chunks`."""
    if answer.status != 200 or not (answer.is_stream or wants_stream):
        return answer
    rest, read, head = answer.chunks(), [], b""
    is_stream: bool | None = None
    async for piece in rest:
        read.append(piece)
        head = (head + piece[:64]).lstrip(_BEFORE) if head else piece.lstrip(_BEFORE)[:64]
        if (is_stream := _is_stream(head, answer.is_stream)) is not None:
            break
    return BegunAnswer(answer, b"".join(read), rest, is_stream=answer.is_stream if is_stream is None else is_stream)


def _is_stream(head: bytes, is_declared: bool) -> bool | None:
    """Whether an answer with this head is a stream; None: not known yet. `is_declared`: by its Content-Type."""
    if not head:
        return None
    if is_declared:
        return not head.startswith((b"{", b"["))
    if head.startswith(_FIELDS):
        return True
    return None if any(field.startswith(head) for field in _FIELDS) else False
