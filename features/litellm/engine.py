"""Runs litellm in a thread with its own event loop, because its import takes seconds."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from threading import Thread
from types import ModuleType
from typing import Any, TypeVar

import orjson

from ...core import sse
from ...core.prices import import_litellm
from ...core.records import Header

T = TypeVar("T")
Json = dict[str, Any]

FUNCTIONS: Mapping[str, str] = {
    "/v1/chat/completions": "acompletion",
    "/v1/completions": "atext_completion",
    "/v1/responses": "aresponses",
    "/v1/messages": "anthropic_messages",
    "/v1/embeddings": "aembedding",
}
# Beside the fields that the official clients know for an API; what else an agent sends could steer litellm itself.
_MORE_FIELDS = {"/v1/chat/completions": {"stream", "thinking", "top_k"}}
_STEERING = {"metadata", "litellm_metadata"}  # litellm's own use of the name, except in /v1/messages


@dataclass(frozen=True, slots=True)
class LitellmStream:
    """A streamed answer that litellm is giving."""

    path: str
    chunks: AsyncIterator[Any]


class Engine:
    """Runs litellm from the first call on. All of litellm's objects stay in its thread; bytes come out."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._litellm: ModuleType | None = None

    async def ask(self, path: str, body: Json, params: Mapping[str, Any]) -> tuple[bytes | LitellmStream, list[Header]]:
        """Return litellm's answer to a call of this API, and the provider's headers as far as litellm keeps them.

        `params` win over `body`. Raises whatever litellm raises.
        """
        return await self._there(self._ask(path, body, params))

    async def next(self, stream: LitellmStream) -> bytes | None:
        """Return the next event of a stream; None after the last."""
        return await self._there(_next(stream))

    def drop(self, stream: LitellmStream) -> None:
        """Release a stream that is not at its end."""
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(_drop(stream), self._loop)

    async def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        await self._there(self._wind_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(target=self._loop.run_forever, name="litellm", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _ask(
        self, path: str, body: Json, params: Mapping[str, Any]
    ) -> tuple[bytes | LitellmStream, list[Header]]:
        if self._litellm is None:
            self._litellm = import_litellm()
        if path == "/v1/messages" and body.get("stream"):
            _require_streamed_messages(self._litellm, body["model"])
        fields = _fields(path)
        given = {name: value for name, value in body.items() if name in fields and value is not None}
        result = await getattr(self._litellm, FUNCTIONS[path])(**{**given, **params})
        headers = list(_provider_headers(result))
        if body.get("stream") and hasattr(result, "__aiter__"):
            return LitellmStream(path, aiter(result)), headers
        return _json(result), headers

    async def _wind_up(self) -> None:
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _require_streamed_messages(litellm: ModuleType, model: str) -> None:
    """Raise ImportError, before the provider is asked, where litellm would need the packages of its own proxy."""
    from litellm.utils import ProviderConfigManager

    provider = litellm.LlmProviders(litellm.get_llm_provider(model)[1])
    if ProviderConfigManager.get_provider_anthropic_messages_config(model=model, provider=provider) is not None:
        importlib.import_module("litellm.proxy.pass_through_endpoints.streaming_handler")


def _fields(path: str) -> frozenset[str]:
    """The request fields of an API, as the packages that litellm builds upon declare them."""
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


async def _next(stream: LitellmStream) -> bytes | None:
    async for chunk in stream.chunks:
        return _event(stream.path, chunk)
    return None


async def _drop(stream: LitellmStream) -> None:
    if (close := getattr(stream.chunks, "aclose", None)) is not None:
        await close()


def _event(path: str, chunk: Any) -> bytes:
    """One event in the API's own framing; of /v1/messages litellm gives bytes that are framed already."""
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


def _provider_headers(result: Any) -> Iterable[Header]:
    hidden: Any = getattr(result, "_hidden_params", None)
    kept = hidden.get("additional_headers") if hasattr(hidden, "get") else None
    for name, value in (kept or {}).items():
        if name.startswith("llm_provider-"):
            yield name.removeprefix("llm_provider-").encode(), str(value).encode()
