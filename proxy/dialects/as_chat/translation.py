"""Defines how a request of another API is answered through vLLM's chat route, which gives token ids. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

Json = dict[str, Any]


class Untranslatable(Exception):
    """Signals a request that the chat route cannot answer as its own route would; `reason` goes into the record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StreamTranslation(Protocol):
    """Turns the chunks of one streamed chat answer into the events of the agent's API, as they come."""

    def feed(self, chunk: Json) -> Iterable[Json]:
        """Return the events for a chunk, an error among them; each has a `type`. The chunk may have more than asked."""

    def end(self) -> Iterable[Json]:
        """Return the events that are left when the chat answer is complete; the last of them ends the stream."""


class Translation(Protocol):
    """Translates one request to chat, and its answer back."""

    chat: Json
    """The body for the chat route, without the additions of the proxy."""

    def answer(self, chat: Json) -> Json:
        """Return a non-streamed chat answer as the agent's API has it."""

    def stream(self) -> StreamTranslation: ...

    def refused(self, error: Json) -> Json:
        """Return the body of the chat route's error as the agent's API has it."""


class Translator(Protocol):
    """Translates the requests of one API. It agrees with what vLLM's own route makes of them."""

    def request(self, body: Json, earlier: Sequence[Json] = ()) -> Translation:
        """Return a request as a chat request; raise Untranslatable.

        `earlier`: the items before the body's own, oldest first, where the body only refers to them.
        """

    def history_message(self, answer: Json) -> Json:
        """Return the chat message that an answer of this API becomes in the next request's history."""
