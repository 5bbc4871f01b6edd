"""Lets a request of another API go through the chat route: chat's to the upstream, its own API's to the agent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from ....core.errors import LightningError, UpstreamUnreachable
from ....core.json_text import encode
from ....core.tokens import Tokens
from ..chat import ChatApi, ChatStream
from ..inject import Injection
from .regular_calls import RegularCalls, regular_answer
from .translation import StreamTranslation, Translation

Json = dict[str, Any]

PATH = "/v1/chat/completions"
CHAT = ChatApi("chat")


class OwnStream(Protocol):
    """Assembles the agent's answer from the events that it is sent."""

    def feed(self, raw: bytes, event: Json) -> bytes: ...

    def response(self) -> Any: ...


class Own(Protocol):
    """The parts of the agent's own dialect that are used here."""

    def stream(self, injection: Injection) -> OwnStream: ...

    def error_body(self, error: LightningError) -> Json: ...


class ThroughChat:
    """One request on its way through the chat route. It is a dialect: it reads chat and gives the agent its own API.

    `chat`: the request for the chat route, without additions of the proxy. `continues`: it continues a response that
    only the proxy knows, so no other route can answer it.
    """

    def __init__(self, own: Own, translation: Translation, *, continues: bool = False) -> None:
        self.chat = translation.chat
        self.continues = continues
        self._own = own
        self._translation = translation

    def inject(self, body: Json) -> tuple[Json, Injection]:
        return CHAT.inject(body)

    def tokens(self, body: Json) -> Tokens:
        return CHAT.tokens(body)

    def stream(self, injection: Injection) -> ThroughChatStream:
        return ThroughChatStream(CHAT.stream(injection), self._own.stream(Injection()), self._translation.stream())

    def agents(self, body: Json, injection: Injection) -> Json:
        """Return the agent's answer; raise UpstreamUnreachable if this is no chat completion."""
        try:
            return self._translation.answer(regular_answer(body))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(error) from None

    def refusal(self, body: Json, status: int) -> Json | None:
        """Return the upstream's error as the agent's API has it; None if it is in no shape of vLLM's."""
        return self._translation.refused(body) if isinstance(body.get("error"), dict) else None

    def error_body(self, error: LightningError) -> Json:
        return self._own.error_body(error)


class ThroughChatStream:
    """The chunks of a chat answer, passed on as the events of the agent's API."""

    usual = None
    finished = False  # the chat stream's end is [DONE], which is no event
    rewrites = True

    def __init__(self, chat: ChatStream, own: OwnStream, translation: StreamTranslation) -> None:
        self._chat = chat
        self._own = own
        self._translation = translation
        self._calls = RegularCalls()

    @property
    def tokens(self) -> Tokens:
        return self._chat.tokens

    @property
    def error(self) -> str | None:
        return self._chat.error

    @property
    def complete(self) -> bool:
        return self._chat.complete

    def feed(self, raw: bytes, event: Json) -> bytes:
        error = self._chat.read(raw, event)
        try:
            return self._sent(self._translation.feed(self._calls.chunk(event) if error is None else {"error": error}))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(error) from None

    def last(self, raw: bytes) -> bytes:
        if self.error:
            return b""
        try:
            if self._own.response() is None:
                raise ValueError("nothing came")
            left = self._calls.rest()
            more = {"choices": [{"index": 0, "delta": {"tool_calls": left}}]}
            return self._sent([*(self._translation.feed(more) if left else ()), *self._translation.end()])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(error) from None

    def flush(self) -> bytes:
        return b""

    def response(self) -> Any:
        return self._own.response()

    def _sent(self, events: Iterable[Json]) -> bytes:
        out = b""
        for event in events:
            raw = b"event: " + str(event["type"]).encode() + b"\ndata: " + encode(event) + b"\n\n"
            out += self._own.feed(raw, event)
        return out


def _unreadable(error: Exception) -> UpstreamUnreachable:
    return UpstreamUnreachable(f"the upstream's answer is no chat completion: {error!r}"[:1000])
