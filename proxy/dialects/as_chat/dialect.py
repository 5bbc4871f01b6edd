"""Lets a request of another API go through the chat route: chat's to the upstream, its own API's to the agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ....core.errors import LightningError, UpstreamUnreachable
from ....core.json_text import encode
from ..chat import ChatApi, ChatStream
from ..stream import Dialect, Injection, Transcript
from .messages import MessagesTranslator
from .responses import ResponsesTranslator
from .translation import MALFORMED, Template, Translator

Json = dict[str, Any]

PATH = "/v1/chat/completions"
CHAT_ENDPOINT = "chat/completions"
# By the name of their endpoint in a record.
TRANSLATORS: Mapping[str, type[Translator]] = MappingProxyType(
    {"messages": MessagesTranslator, "responses": ResponsesTranslator}
)
# An unknown one would make requests untranslatable, and what decides how an answer is sampled is the same with any.
_ANY_TEMPLATE = Template(merges_system=False, disabled_effort="none", ignores_no_tools=True)


class ThroughChat(ChatApi):
    """One request on its way through the chat route. As a dialect it reads chat and gives the agent its own API.

    `chat`: the request for the chat route, without additions of the proxy. `continues`: it continues a response that
    only the proxy knows, so no other route can answer it.
    """

    def __init__(self, own: Dialect, translator: Translator, chat: Json, *, continues: bool) -> None:
        super().__init__("chat")
        self.chat = chat
        self.continues = continues
        self._own = own
        self._translator = translator

    def stream(self, injection: Injection) -> ThroughChatStream:
        return ThroughChatStream(self._own.stream(Injection()), self._translator)

    def agents(self, body: Json, injection: Injection) -> Json:
        """Return the agent's answer; raise UpstreamUnreachable if this is no chat completion."""
        try:
            return self._translator.answer(body)
        except MALFORMED as error:
            raise _unreadable(error) from None

    def refusal(self, body: Json) -> Json | None:
        """Return the upstream's error as the agent's API has it; None if it is in no shape of vLLM's."""
        return self._translator.refusal(body) if isinstance(body.get("error"), dict) else None

    def error_body(self, error: LightningError) -> Json:
        return self._own.error_body(error)


class ThroughChatStream(ChatStream):
    """The chunks of a chat answer, passed on as the events of the agent's API."""

    def __init__(self, own: Transcript, translator: Translator) -> None:
        super().__init__(Injection())
        self.rewrites = True
        self._own = own
        self._translator = translator

    def take(self, raw: bytes, event: Json) -> bytes:
        error = self.read(raw, event)
        return self._sent(self._translator.feed(event) if error is None else [self._translator.error(error)])

    def last(self, raw: bytes) -> bytes:
        if self.failure:
            return b""
        if self._own.response() is None:
            raise _unreadable(ValueError("nothing came"))
        return self._sent(self._translator.end())

    def response(self) -> Any:
        return self._own.response()

    def _sent(self, events: Iterable[Json]) -> bytes:
        out = b""
        try:
            for event in events:
                raw = b"event: " + str(event["type"]).encode() + b"\ndata: " + encode(event) + b"\n\n"
                out += self._own.take(raw, event)
        except MALFORMED as error:
            raise _unreadable(error) from None
        return out


def _unreadable(error: Exception) -> UpstreamUnreachable:
    return UpstreamUnreachable(f"the upstream's answer is no chat completion: {error!r}"[:1000])


def as_chat(
    endpoint: str, request: Json, template: Template = _ANY_TEMPLATE, earlier: Sequence[Json] = ()
) -> Json | None:
    """Return a recorded request as the chat request that it was sent as; None if there is none."""
    if endpoint == CHAT_ENDPOINT:
        return request
    translator = TRANSLATORS.get(endpoint)
    try:
        return None if translator is None else translator(request).chat(template, earlier)
    except MALFORMED:
        return None


def chat_answer(endpoint: str, response: Any) -> Any:
    """Return a recorded answer as the chat answer that a later request has in its history."""
    translator = TRANSLATORS.get(endpoint)
    if translator is None or not isinstance(response, dict):
        return response
    try:
        message = translator.history(response)
    except MALFORMED:
        message = {"role": "assistant"}
    return {"choices": [{"index": 0, "message": message}]}
