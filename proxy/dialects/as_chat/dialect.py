"""Lets a request of another API go through the chat route: chat's to the upstream, its own API's to the agent.

Translations get the tool calls of a chat stream as OpenAI sends them, however the server sends them: one call after the
other, counted from 0, with id, type and name in its first piece alone, and arguments as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol
from uuid import uuid4

from ....core.errors import LightningError, UpstreamUnreachable
from ....core.json_text import encode
from ....core.tokens import Tokens
from ....core.tools import call_arguments
from ..assemble import StreamedCall, ToolCalls
from ..chat import ChatApi, ChatStream
from ..stream import Injection
from .messages import MessagesTranslator
from .responses import ResponsesTranslator
from .translation import StreamTranslation, Template, Translation, Translator, Untranslatable

Json = dict[str, Any]

PATH = "/v1/chat/completions"
CHAT = ChatApi("chat")

CHAT_ENDPOINT = "chat/completions"
# By the name of their endpoint in a record: what makes a translator for a server with this template.
TRANSLATORS: Mapping[str, Callable[[Template], Translator]] = MappingProxyType(
    {"messages": MessagesTranslator, "responses": lambda template: ResponsesTranslator()}
)
# An unknown one would make requests untranslatable, and what decides how an answer is sampled is the same with any.
_ANY_TEMPLATE = Template(merges_system=False, disabled_effort="none", ignores_no_tools=True)


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


class RegularCalls:
    """The calls of the first choice. A call waits until the one before it is complete, or the answer has ended."""

    def __init__(self) -> None:
        self._calls = ToolCalls()
        self._place = 0  # of the call that is being sent
        self._sent: list[int] = []  # by call: how many characters of its arguments were sent

    def chunk(self, event: Json) -> Json:
        """Return a chunk with regular tool calls in the place of its own; other chunks as they are."""
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return event
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        ends = bool(choice.get("finish_reason"))
        if not delta.get("tool_calls") and not (ends and self._calls.opened):
            return event
        self._calls.feed(delta.get("tool_calls") or [])
        pieces = self.rest() if ends else self._pieces(to_the_end=False)
        delta = {name: value for name, value in delta.items() if name != "tool_calls"}
        regular = choice | {"delta": delta | ({"tool_calls": pieces} if pieces else {})}
        return event | {"choices": [regular, *event["choices"][1:]]}

    def rest(self) -> list[Json]:
        """Return the pieces that were not sent yet."""
        return self._pieces(to_the_end=True)

    def _pieces(self, *, to_the_end: bool) -> list[Json]:
        found: list[Json] = []
        calls = self._calls.opened
        while self._place < len(calls):
            call = calls[self._place]
            if not to_the_end and not (call.name and (call.id or call.text)):
                break
            waits = call.may_change and self._place + 1 == len(calls) and not to_the_end
            text = "" if waits else call.text
            if self._place == len(self._sent):
                self._sent.append(0)
                found.append(_first(self._place, call, text))
            elif len(text) > self._sent[self._place]:
                more = text[self._sent[self._place] :]
                found.append({"index": self._place, "function": {"arguments": more}})
            self._sent[self._place] = max(self._sent[self._place], len(text))
            if self._place + 1 == len(calls) or not (to_the_end or call.is_complete):
                break
            self._place += 1
        return found


def _first(index: int, call: StreamedCall, text: str) -> Json:
    """The first piece of a call. One without an id gets one, as vLLM writes them."""
    call_id = call.id or f"chatcmpl-tool-{uuid4().hex}"
    return {"index": index, "id": call_id, "type": "function", "function": {"name": call.name, "arguments": text}}


def regular_answer(chat: Json) -> Json:
    """Return a non-streamed chat answer in which the arguments of tool calls are text."""
    choice, *others = chat["choices"]
    calls = choice["message"].get("tool_calls")
    if not calls or all(isinstance(call["function"]["arguments"], str) for call in calls):
        return chat
    message = choice["message"] | {"tool_calls": [_with_text(call) for call in calls]}
    return chat | {"choices": [choice | {"message": message}, *others]}


def _with_text(call: Json) -> Json:
    return call | {"function": call["function"] | {"arguments": call_arguments(call["function"])}}


def chat_request(endpoint: str, request: Json, template: Template, earlier: Sequence[Json] = ()) -> Json | None:
    """Return a recorded request as the chat request that it was sent as; None if there is none."""
    if endpoint == CHAT_ENDPOINT:
        return request
    make = TRANSLATORS.get(endpoint)
    try:
        return None if make is None else make(template).request(request, earlier).chat
    except (Untranslatable, LookupError, TypeError, ValueError, AttributeError):
        return None


def as_chat(endpoint: str, request: Json) -> Json | None:
    """Return a recorded request as some server's chat request, whatever its template; None if there is none."""
    return chat_request(endpoint, request, _ANY_TEMPLATE)


def chat_answer(endpoint: str, response: Any) -> Any:
    """Return a recorded answer as the chat answer that a later request has in its history."""
    make = TRANSLATORS.get(endpoint)
    if make is None or not isinstance(response, dict):
        return response
    return {"choices": [{"index": 0, "message": make(Template()).history_message(response)}]}
