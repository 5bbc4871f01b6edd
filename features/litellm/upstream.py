"""Calls providers without an OpenAI protocol through litellm. docs/providers.md says what gets lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import orjson

from ...core.config.upstreams import UpstreamConfig
from ...core.errors import InvalidRequest, LightningError, NotFound, Unsupported, UpstreamTimeout, UpstreamUnreachable
from ...core.records import Header
from ...proxy.dialects.dialects import DIALECTS
from ...proxy.gateway.upstream import KeyMask, Request
from .engine import FUNCTIONS, Engine, LitellmStream
from .errors import ProviderError, translated

# Of the provider's headers, those about its connection to litellm, or about a body that is made anew.
_DROPPED = re.compile(rb"(?i)content-.*|transfer-encoding|connection|keep-alive|date|server|set-cookie|alt-svc|vary")
_HAS_DONE = frozenset({"/v1/chat/completions", "/v1/completions"})
_JSON: Header = (b"content-type", b"application/json")
_EVENTS: Header = (b"content-type", b"text/event-stream")


class LitellmUpstream:
    """Sends the agent's request through litellm, and makes HTTP answers of its objects."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config
        self._engine = Engine()
        named = {model: config.model_map.get(model, model) for model in config.models} | config.model_map
        self._listed, self._served = sorted(named), frozenset(named.values())

    async def open(self, request: Request) -> LitellmAnswer:
        """Make one call of litellm, without any retry of its own. Also raise InvalidRequest, NotFound."""
        if request.method == "GET" and request.path == "/v1/models":
            models = [{"id": name, "object": "model", "owned_by": self._config.name} for name in self._listed]
            return LitellmAnswer(200, [_JSON], [orjson.dumps({"object": "list", "data": models})])
        if request.method != "POST" or request.path not in FUNCTIONS:
            raise Unsupported(f"upstream {self._config.name}: kind litellm has no {request.method} {request.path}")
        body, key = self._parsed(request), self._key(request)
        call = _Call(self._config, self._engine, request.path, key)
        try:
            return await call.begin(body)
        except ProviderError as error:
            dialect = DIALECTS.get(request.path)
            shown = dialect.error_body(error) if dialect else error.body()
            return LitellmAnswer(error.status, [_JSON, *error.headers], [orjson.dumps(shown)])

    async def close(self) -> None:
        await self._engine.close()

    def _parsed(self, request: Request) -> dict[str, Any]:
        try:
            body = orjson.loads(request.sent_body())
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
        model = body.get("model") if isinstance(body, dict) else None
        if model not in self._served:
            raise NotFound(
                f"upstream {self._config.name} has no model {model!r}: kind litellm serves what its models and "
                "model_map name",
                param="model",
            )
        if "messages" in body and not _is_conversation(body["messages"]):
            raise InvalidRequest("messages must be a list of objects, one at least", param="messages")
        return dict(body)

    def _key(self, request: Request) -> str | None:
        """The upstream's own key, else the agent's; None leaves it to the provider's environment variables."""
        if self._config.api_key is not None:
            return self._config.api_key.get_secret_value()
        headers = {name.lower(): value.decode("latin-1") for name, value in request.headers}
        if not request.forward_authorization:
            return None
        bearer = headers.get(b"authorization", "")
        return headers.get(b"x-api-key") or bearer.removeprefix("Bearer ").strip() or None


def _is_conversation(messages: Any) -> bool:
    """Whether messages are a list of objects; others make litellm fail in ways that look like the provider's."""
    return isinstance(messages, list) and bool(messages) and all(isinstance(message, dict) for message in messages)


class _Call:
    """One call of litellm within the upstream's time limits, its failures as our errors."""

    def __init__(self, config: UpstreamConfig, engine: Engine, path: str, key: str | None) -> None:
        self._config = config
        self._engine = engine
        self._path = path
        self._key = key
        self._mask = KeyMask(*config.masked)

    async def begin(self, body: dict[str, Any]) -> LitellmAnswer:
        seconds = self._config.first_byte_timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await self._begin(body)
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {self._config.name}: no answer within {seconds} s") from None
        except Exception as error:
            raise self._translated(error) from None

    async def _begin(self, body: dict[str, Any]) -> LitellmAnswer:
        result, provided = await self._engine.ask(self._path, body, self._params())
        headers = [(name, self._masked(value)) for name, value in provided if not _DROPPED.fullmatch(name)]
        if isinstance(result, bytes):
            return LitellmAnswer(200, [_JSON, *headers], [self._masked(result)])
        # What comes first may be litellm's own, ahead of any answer of the provider.
        held = [await self._engine.next(result)]
        while held[-1] is not None and b'"message_start"' in held[-1]:
            held.append(await self._engine.next(result))
        begun = [self._masked(event) for event in held if event is not None]
        return LitellmAnswer(
            200, [_EVENTS, *headers], begun, lambda: self._rest(result), lambda: self._engine.drop(result)
        )

    async def _rest(self, stream: LitellmStream) -> AsyncIterator[bytes]:
        seconds = self._config.idle_timeout_s
        while True:
            try:
                async with asyncio.timeout(seconds):
                    event = await self._engine.next(stream)
            except TimeoutError:
                raise UpstreamTimeout(f"upstream {self._config.name}: nothing for {seconds} s") from None
            except Exception as error:
                message = self._translated(error).message
                raise UpstreamUnreachable(f"upstream {self._config.name} broke off: {message}") from None
            if event is None:
                break
            yield self._masked(event)
        if self._path in _HAS_DONE:
            yield b"data: [DONE]\n\n"

    def _masked(self, data: bytes) -> bytes:
        """The data without the upstream's own key, as in the answers of other upstreams."""
        return self._mask.once(data)

    def _params(self) -> dict[str, Any]:
        """The operator's settings win over the agent's request; litellm's own time limit is only a net under ours."""
        timeout = self._config.first_byte_timeout_s + self._config.idle_timeout_s
        ours = {"api_base": self._config.base_url, "api_key": self._key, "timeout": timeout}
        given = {name: value for name, value in ours.items() if value is not None}
        return self._config.litellm_params | given | {"num_retries": 0, "max_retries": 0}

    def _translated(self, error: Exception) -> LightningError:
        return translated(error, self._config.name, [self._key or "", *self._config.masked])


class LitellmAnswer:
    """An answer of litellm: the bytes received so far, and those to come."""

    def __init__(
        self,
        status: int,
        headers: Iterable[Header],
        begun: Sequence[bytes],
        rest: Callable[[], AsyncIterator[bytes]] | None = None,
        drop: Callable[[], None] | None = None,
    ) -> None:
        self.status = status
        self.is_stream = rest is not None
        self._headers = list(headers)
        self._begun = begun
        self._rest = rest
        self._drop = drop

    @property
    def retry_after(self) -> str:
        return next((value.decode("latin-1") for name, value in self._headers if name == b"retry-after"), "")

    def headers(self, *, keep_length: bool) -> list[Header]:
        length = [] if self.is_stream or not keep_length else [(b"content-length", str(len(self._begun[0])).encode())]
        return [*self._headers, *length]

    async def chunks(self) -> AsyncIterator[bytes]:
        for data in self._begun:
            yield data
        if self._rest is not None:
            async for data in self._rest():
                yield data
            self._drop = None

    async def read(self) -> bytes:
        return b"".join([data async for data in self.chunks()])

    def release(self) -> None:
        if self._drop is not None:
            self._drop()
