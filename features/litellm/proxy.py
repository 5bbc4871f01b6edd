"""Calls providers through litellm (`kind: litellm`, docs/providers.md), in one thread for each upstream."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import orjson

from ...core import sse
from ...core.config.address import without_addresses
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import InvalidRequest, LightningError, NotFound, Unsupported, UpstreamTimeout, UpstreamUnreachable
from ...core.prices import import_litellm, require_litellm
from ...core.records import Header
from ...core.tools import dicts
from ...proxy.gateway.relay import DIALECTS
from ...proxy.gateway.upstream import Answer, KeyMask, NoConnection, Request, Upstream
from ...proxy.hooks import ProxyPlugin

# Headers that are not passed on: they are about the provider's connection to litellm, or about the original body.
_DROPPED = re.compile(rb"(?i)content-.*|transfer-encoding|connection|keep-alive|date|server|set-cookie|alt-svc|vary")
_HAS_DONE = frozenset({"/v1/chat/completions", "/v1/completions"})
_JSON: Header = (b"content-type", b"application/json")
_EVENTS: Header = (b"content-type", b"text/event-stream")
T = TypeVar("T")
Json = dict[str, Any]
FUNCTIONS: Mapping[str, str] = {
    "/v1/chat/completions": "acompletion", "/v1/completions": "atext_completion", "/v1/responses": "aresponses",
    "/v1/messages": "anthropic_messages", "/v1/embeddings": "aembedding",
}  # fmt: skip
# In addition to the fields that the official clients declare for an API. Others could steer litellm itself.
_MORE_FIELDS = {"/v1/chat/completions": {"stream", "thinking", "top_k"}}
_STEERING = {"metadata", "litellm_metadata"}  # litellm's own use of the name, except in /v1/messages
# Of aiohttp and httpx; matched by name, so that neither is imported here.
_NO_CONNECTION = frozenset({"ClientConnectorError", "ClientConnectorDNSError", "ConnectError", "ConnectTimeout"})
_KEPT = ("retry-after", "request-id", "x-request-id")
_SECRET_NAME = re.compile(r"(?i)key|token|secret|password|credential")
_SHORTEST_SECRET = 8
_LONGEST_MESSAGE = 2000
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip


class LitellmUpstream:
    """Sends requests through litellm within the upstream's time limits, and turns the results into HTTP answers."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config
        self._mask = KeyMask(*config.masked)
        self._thread = LitellmThread()
        named = {model: config.model_map.get(model, model) for model in config.models} | config.model_map
        self._listed, self._served = sorted(named), frozenset(named.values())

    async def open(self, request: Request) -> LitellmAnswer:
        """Call litellm or list the models. The provider's errors become answers; other errors are raised."""
        name, path, seconds = self._config.name, request.path, self._config.first_byte_timeout_s
        if request.method == "GET" and path == "/v1/models":
            models = [{"id": model, "object": "model", "owned_by": name} for model in self._listed]
            return LitellmAnswer(200, [_JSON], orjson.dumps({"object": "list", "data": models}))
        if request.method != "POST" or path not in FUNCTIONS:
            raise Unsupported(f"upstream {name}: kind litellm does not support {request.method} {path}")
        body, key = self._parsed(request), self._key(request)
        try:
            async with asyncio.timeout(seconds):
                return await self._begun(path, body, key)
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {name} gave no answer within {seconds} s") from None
        except Exception as error:
            found = self._translated(error, key)
            if not isinstance(found, ProviderError):
                raise found from None
            dialect = DIALECTS.get(path)
            shown = dialect.error_body(found) if dialect else found.body()
            return LitellmAnswer(found.status, [_JSON, *found.headers], orjson.dumps(shown))

    async def close(self) -> None:
        await self._thread.close()

    def _parsed(self, request: Request) -> Json:
        try:
            body = orjson.loads(request.sent_body())
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
        model = body.get("model") if isinstance(body, dict) else None
        if model not in self._served:
            raise NotFound(
                f"upstream {self._config.name} has no model {model!r}: kind litellm serves only the names in "
                "models and model_map",
                param="model",
            )
        messages = body.get("messages", [{}])  # others make litellm fail in ways that look like the provider's
        if not messages or dicts(messages) != messages:
            raise InvalidRequest("messages must be a non-empty list of objects", param="messages")
        return dict(body)

    def _key(self, request: Request) -> str | None:
        """The upstream's own key, or else the agent's if forwarded. If None, litellm reads the provider's variables."""
        if self._config.api_key is not None:
            return self._config.api_key.get_secret_value()
        headers = {name.lower(): value.decode("latin-1") for name, value in request.headers}
        if not request.forward_authorization:
            return None
        bearer = headers.get(b"authorization", "")
        return headers.get(b"x-api-key") or bearer.removeprefix("Bearer ").strip() or None

    async def _begun(self, path: str, body: Json, key: str | None) -> LitellmAnswer:
        """Call litellm, with the operator's settings in place of the agent's, and wait until the answer begins."""
        timeout = self._config.first_byte_timeout_s + self._config.idle_timeout_s
        ours = {"api_base": self._config.base_url, "api_key": key, "timeout": timeout}
        given = {name: value for name, value in ours.items() if value is not None}
        params = self._config.litellm_params | given | {"num_retries": 0, "max_retries": 0}
        result, provided = await self._thread.run(_asked(path, body, params))
        headers = [(name, self._mask.once(value)) for name, value in provided if not _DROPPED.fullmatch(name)]
        if isinstance(result, bytes):
            return LitellmAnswer(200, [_JSON, *headers], self._mask.once(result))
        # The first events may be litellm's own, sent before the provider has answered.
        begun = event = await self._thread.run(anext(result, b""))
        while b'"message_start"' in event:
            event = await self._thread.run(anext(result, b""))
            begun += event
        rest = self._rest(path, result, key)
        return LitellmAnswer(200, [_EVENTS, *headers], self._mask.once(begun), rest, lambda: self._thread.drop(result))

    async def _rest(self, path: str, events: AsyncGenerator[bytes], key: str | None) -> AsyncIterator[bytes]:
        name, seconds = self._config.name, self._config.idle_timeout_s
        while True:
            try:
                async with asyncio.timeout(seconds):
                    event = await self._thread.run(anext(events, b""))
            except TimeoutError:
                raise UpstreamTimeout(f"upstream {name} sent nothing for {seconds} s") from None
            except Exception as error:
                message = self._translated(error, key).message
                raise UpstreamUnreachable(f"upstream {name} failed: {message}") from None
            if not event:
                break
            yield self._mask.once(event)
        if path in _HAS_DONE:
            yield b"data: [DONE]\n\n"

    def _translated(self, error: Exception, key: str | None) -> LightningError:
        return translated(error, self._config.name, [key or "", *self._config.masked])


class LitellmAnswer(Answer):
    def __init__(
        self, status: int, headers: Sequence[Header], begun: bytes, rest: AsyncIterator[bytes] | None = None,
        drop: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        again = next((value.decode("latin-1") for name, value in headers if name == b"retry-after"), "")
        super().__init__(status, is_stream=rest is not None, retry_after=again)
        self._headers, self._ahead, self._length = headers, begun, len(begun)
        self._rest, self._drop = rest, drop

    def headers(self, *, keep_length: bool) -> list[Header]:
        length = [] if self.is_stream or not keep_length else [(b"content-length", str(self._length).encode())]
        return [*self._headers, *length]

    async def _next(self) -> bytes:
        return b"" if self._rest is None else await anext(self._rest, b"")

    def release(self) -> None:
        self._drop()


class LitellmThread:
    """A thread with an event loop, started by the first call, in which an upstream's litellm objects live."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None

    async def run(self, work: Awaitable[T]) -> T:
        """Do the work in this thread. Raises whatever the work raises."""

        async def there() -> T:
            return await work

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(target=self._loop.run_forever, name="litellm", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), self._loop))

    def drop(self, events: AsyncGenerator[bytes]) -> None:
        """Release a stream that may not have ended."""
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(events.aclose(), self._loop)

    async def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        await self.run(_wind_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()


async def _asked(
    path: str, body: Json, params: Mapping[str, Any]
) -> tuple[bytes | AsyncGenerator[bytes], list[Header]]:
    """litellm's answer, and the provider's headers as far as litellm keeps them. `params` override `body`."""
    litellm = import_litellm()
    if path == "/v1/messages" and body.get("stream"):
        _require_streamed_messages(litellm, body["model"])
    fields = _fields(path)
    given = {name: value for name, value in body.items() if name in fields and value is not None}
    result = await getattr(litellm, FUNCTIONS[path])(**{**given, **params})
    hidden: Any = getattr(result, "_hidden_params", None)
    kept = (hidden.get("additional_headers") if hasattr(hidden, "get") else None) or {}
    headers = [
        (name.removeprefix("llm_provider-").encode(), str(value).encode())
        for name, value in kept.items()
        if name.startswith("llm_provider-")
    ]
    if body.get("stream") and hasattr(result, "__aiter__"):
        return _events(path, result), headers
    return _json(result), headers


async def _events(path: str, chunks: Any) -> AsyncGenerator[bytes]:
    try:
        async for chunk in chunks:
            yield _event(path, chunk)
    finally:
        if (close := getattr(chunks, "aclose", None)) is not None:
            await close()


async def _wind_up() -> None:
    if (litellm := sys.modules.get("litellm")) is not None:
        await litellm.close_litellm_async_clients()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _require_streamed_messages(litellm: ModuleType, model: str) -> None:
    """Raise ImportError, before the provider is called, if packages that litellm needs for streaming are missing."""
    from litellm.utils import ProviderConfigManager

    provider = litellm.LlmProviders(litellm.get_llm_provider(model)[1])
    if ProviderConfigManager.get_provider_anthropic_messages_config(model=model, provider=provider) is not None:
        importlib.import_module("litellm.proxy.pass_through_endpoints.streaming_handler")


def _fields(path: str) -> frozenset[str]:
    """The request fields that are passed on: those of the API and a few more, but none that steer litellm."""
    from litellm.types.llms.anthropic import AnthropicMessagesRequest
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    declared: Mapping[str, Any] = {
        "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
        "/v1/completions": completion_create_params.CompletionCreateParamsBase,
        "/v1/responses": response_create_params.ResponseCreateParamsBase,
        "/v1/messages": AnthropicMessagesRequest,
        "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    }
    steering = _STEERING - ({"metadata"} if path == "/v1/messages" else set())
    return frozenset({*declared[path].__annotations__, "stream", *_MORE_FIELDS.get(path, ())} - steering)


def _event(path: str, chunk: Any) -> bytes:
    """One event in the API's own framing. For /v1/messages, litellm returns bytes that are framed already."""
    if isinstance(chunk, bytes):
        return chunk
    if path == "/v1/completions" and not (chunk.usage and chunk.usage.total_tokens):
        del chunk.usage  # zeros, in every chunk
    data = sse.encode(_json(chunk))
    kind = getattr(chunk, "type", None) if path == "/v1/responses" else None
    return f"event: {getattr(kind, 'value', kind)}\n".encode() + data if kind is not None else data


def _json(result: Any) -> bytes:
    value = result.model_dump(mode="json", exclude_unset=True) if hasattr(result, "model_dump") else result
    return orjson.dumps(value)


class ProviderError(LightningError):
    """An error response of the provider, or of litellm if the provider sent none."""

    def __init__(self, message: str, status: int, headers: list[Header]) -> None:
        super().__init__(message)
        self.status = status
        self.type = _TYPES.get(status, "upstream_error")
        self.headers = tuple(headers)


def translated(error: Exception, upstream: str, secrets: Iterable[str]) -> LightningError:
    """Return the error to show: ProviderError for a refusal, else one that says why there is no answer."""
    text = str(error).partition("\nTraceback (most recent call last)")[0]
    message = redacted(text, secrets)[:_LONGEST_MESSAGE]
    chain = list(_chain(error))
    if isinstance(error, ImportError):
        return Unsupported(
            f"upstream {upstream}: litellm cannot do this without more packages ({message}); "
            "docs/providers.md has alternatives"
        )
    names = {type(e).__name__ for e in chain}
    if names & _NO_CONNECTION:
        return NoConnection(f"upstream {upstream} cannot be reached through litellm: {message}")
    if "Timeout" in names:
        return UpstreamTimeout(f"upstream {upstream} did not answer litellm in time: {message}")
    # The provider's own status: litellm changes some errors, but keeps the original one as their cause.
    others = [e for e in chain if not type(e).__module__.startswith("litellm.exceptions")]
    found = [status for e in others if isinstance(status := getattr(e, "status_code", None), int)]
    status = next((status for status in reversed(found) if 400 <= status < 600), None)
    own = getattr(error, "status_code", None)
    if status is None and "APIConnectionError" in names:
        return UpstreamUnreachable(f"upstream {upstream} failed: {message}")
    refusal = own if isinstance(own, int) and 400 <= own < 600 else 502  # litellm's own
    return ProviderError(message, status or refusal, _headers(chain))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return the text without addresses and without secrets of at least 8 characters, given or in the environment."""
    known = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    for secret in sorted({*secrets, *known}, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "[redacted]")
    return without_addresses(text)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _headers(chain: Iterable[Any]) -> list[Header]:
    for error in chain:
        headers = getattr(error, "litellm_response_headers", None) or getattr(error, "headers", None) or {}
        if kept := [(name.encode(), str(headers[name]).encode()) for name in _KEPT if name in headers]:
            return kept
    return []


class LitellmPlugin(ProxyPlugin):
    upstreams: ClassVar[Mapping[str, Callable[[UpstreamConfig], Upstream]]] = {"litellm": LitellmUpstream}

    async def check(self) -> None:
        for upstream in self.config.upstreams:
            if upstream.kind == "litellm":
                require_litellm(f"upstream {upstream.name} of kind litellm")


plugin = LitellmPlugin
