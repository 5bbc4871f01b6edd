"""Defines how requests of other APIs are answered through vLLM's chat route, which returns token ids. Pure.

How vLLM's own Messages route uses the chat template differs between servers. So the proxy probes two routes: one
counts the tokens of a Messages request, the other returns the tokens of a chat.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from ....core.errors import LightningError, UpstreamUnreachable
from ....core.json_text import encode
from ....core.values import as_read
from ..assemble import StreamedCall, ToolCalls
from ..chat import ChatApi, ChatStream
from ..stream import Dialect, Injection

Json = dict[str, Any]

PATH = "/v1/chat/completions"
# What is raised where a request or an answer is not as its API says.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)

_USER: Json = {"role": "user", "content": "Hi"}
_ASSISTANT: Json = {"role": "assistant", "content": "Hello"}
_INLINE: Json = {"role": "system", "content": "Go on."}


def picked(source: Json, names: str) -> Json:
    """Return the fields with these names that are present and not null."""
    return {name: source[name] for name in names.split() if source.get(name) is not None}


class Untranslatable(ValueError):
    """The call cannot be written as chat with the same effect. Users see the text as the reason."""


class TemplateUnknown(Untranslatable):
    """The request can be translated only once the server's template is known."""


@dataclass(frozen=True)
class Template:
    """What is known about a server's chat template; None means unknown.

    `merges_system`: all system messages are moved to the front. `disabled_effort`: the effort that means disabled
    thinking. `ignores_no_tools`: an empty list of tools counts as none.
    """

    merges_system: bool | None = None
    disabled_effort: str | None = None
    ignores_no_tools: bool | None = None

    def known(self, name: str) -> Any:
        """Return a field's value; raise TemplateUnknown if it is None."""
        if (value := getattr(self, name)) is None:
            raise TemplateUnknown(f"the server's chat template could not be probed ({name} is unknown)")
        return value


def _counted(**body: Any) -> tuple[str, Json]:
    return "/v1/messages/count_tokens", body


def _rendered(**body: Any) -> tuple[str, Json]:
    return PATH, body | {"max_tokens": 1, "return_token_ids": True}


# What to post, by name: a path, and a body that lacks the model.
PROBES: dict[str, tuple[str, Json]] = {
    "inline": _counted(system="Hm.", messages=[_USER, _ASSISTANT, _INLINE, _USER]),
    "merged": _rendered(messages=[{"role": "system", "content": "Hm.Go on."}, _USER, _ASSISTANT, _USER]),
    "in place": _rendered(messages=[{"role": "system", "content": "Hm."}, _USER, _ASSISTANT, _INLINE, _USER]),
    "no tools": _counted(messages=[_USER], tools=[]),
    "plain": _rendered(messages=[_USER]),
    "disabled": _counted(messages=[_USER], thinking={"type": "disabled"}),
    "none": _rendered(messages=[_USER], reasoning_effort="none"),
    "low": _rendered(messages=[_USER], reasoning_effort="low"),
}


def learn(answers: Mapping[str, tuple[int, Any]]) -> Template:
    """Infer the chat template's behaviour from the answers (status and body) to the probes. What is unclear is None."""
    bodies = {name: body if status == 200 else {} for name, (status, body) in answers.items()}
    prompts = {name: body.get("prompt_token_ids") or [] for name, body in bodies.items()}
    counts = {name: body.get("input_tokens") or len(prompts[name]) for name, body in bodies.items()}
    if {status for status, _ in answers.values()} - {200, 400} or not counts["plain"]:
        return Template()
    merged, in_place = counts["merged"], counts["in place"]
    disabled = "low" if prompts["none"] in ([], prompts["low"]) else "none"
    return Template(
        {merged: True, in_place: False}.get(counts["inline"]) if counts["inline"] and merged != in_place else None,
        disabled if counts[disabled] == counts["disabled"] > 0 else None,
        counts["no tools"] == counts["plain"],
    )


class Translator(ChatApi, ABC):
    """Translates a call of another API to chat, and the chat answer to events of its `own` API.

    One part of the answer is open at a time: its reasoning, its content, or a tool call. Tool calls are sent one after
    another, however they arrive; text that arrives inside one waits for its end. `request`: the request for the chat
    route, without the proxy's additions. `continues`: whether this call continues a response that only the proxy has,
    so that no other route can answer it.
    """

    own: ClassVar[Dialect]
    kinds: tuple[str, ...] = ("reasoning", "content")  # the texts that are shown
    opened_by_nothing: ClassVar[tuple[str, ...]] = ()  # the kinds that vLLM opens even for an empty string

    def __init__(self, body: Json) -> None:
        super().__init__("chat")
        self.request: Json = {}
        self.continues = False
        self.body = {name: value for name, value in as_read(body).items() if value is not None}
        self.told: Json = {}  # the newest fields of the chunks
        self.choice: Json = {"finish_reason": "stop"}  # the one that says why the answer ended
        self.calls = ToolCalls()
        self.kind = ""  # of the open part; a tool call is a "call"
        self._place = 0  # of the call that is open, or is opened next
        self._sent = 0  # characters of its arguments
        self._held: list[tuple[str, str]] = []

    @abstractmethod
    def chat(self, template: Template, earlier: Sequence[Json] = ()) -> Json:
        """Return the request for the chat route, without the proxy's additions. Raises Untranslatable if there is none.

        `earlier`: the items before the body's own, oldest first, if the body only refers to them.
        """

    @staticmethod
    @abstractmethod
    def history(answer: Json) -> Json:
        """Return the chat message that an answer of this API becomes in the next request's history."""

    def stream(self, injection: Injection) -> ChatStream:
        return TranslatedStream(self)

    def agents(self, body: Json, injection: Injection) -> Json:
        """Return the answer for the agent; raise UpstreamUnreachable if `body` is not a chat completion."""
        try:
            return self.answer(body)
        except MALFORMED as error:
            raise _unreadable(error) from None

    def error_body(self, error: LightningError) -> Json:
        return self.own.error_body(error)

    def feed(self, chunk: Json) -> Iterator[Json]:
        """Yield the events for a chunk. The chunk may contain more than the agent asked for."""
        is_first = not self.told
        self.told |= {name: value for name, value in chunk.items() if value is not None}
        if is_first:
            yield from self.begun()
        for choice in chunk["choices"][:1]:
            delta, ends = choice.get("delta") or {}, bool(choice.get("finish_reason"))
            if ends:
                self.choice = choice
            for kind in self.kinds:
                if (text := delta.get(kind)) or (text == "" and kind in self.opened_by_nothing):
                    yield from self._text(kind, text)
            if calls := delta.get("tool_calls"):
                self.calls.feed(calls)
            if calls or ends:
                yield from self._called(is_all=ends)

    def end(self) -> Iterator[Json]:
        """Yield the remaining events once the chat answer is complete; the last of them ends the stream."""
        yield from self._called(is_all=True)
        yield from self._closed()
        yield from self.ended()

    def answer(self, chat: Json) -> Json:
        """Return a non-streamed chat answer in the form of the agent's API."""
        choice = chat["choices"][0]
        message = choice["message"]
        delta = {kind: message.get(kind) or None for kind in self.kinds}
        delta["tool_calls"] = [{"index": index} | call for index, call in enumerate(message.get("tool_calls") or ())]
        return self.whole([*self.feed(chat | {"choices": [choice | {"delta": delta}]}), *self.end()])

    def _text(self, kind: str, text: str) -> Iterator[Json]:
        if self.kind == "call" and not self.calls.opened[self._place].is_complete:
            self._held.append((kind, text))
            return
        yield from self._closed(kind)
        if not self.kind:
            self.kind = kind
            yield from self.opened(kind)
        yield from self.added(text)

    def _called(self, *, is_all: bool) -> Iterator[Json]:
        """Events for new pieces of calls. A call waits for the end of the one before it or of the answer (`is_all`)."""
        calls = self.calls.opened
        while self._place < len(calls):
            call, is_last = calls[self._place], self._place + 1 == len(calls)
            if self.kind != "call":
                if not (is_all or (call.name and (call.id or call.text))):
                    return
                yield from self._closed()
                self.kind = "call"
                yield from self.opened("call", call.id or f"chatcmpl-tool-{uuid4().hex}", call.name)
            if not call.may_change:
                yield from self._more_of(call)
            if is_last or not (is_all or call.is_complete):
                return
            yield from self._closed()

    def _more_of(self, call: StreamedCall) -> Iterator[Json]:
        if more := call.text[self._sent :]:
            self._sent += len(more)
            yield from self.added(more)

    def _closed(self, unless: str = "") -> Iterator[Json]:
        """Close the open part unless it is of kind `unless`, then send the text that waited for its end."""
        while self.kind not in ("", unless):
            if self.kind == "call":
                yield from self._more_of(self.calls.opened[self._place])
                self._place, self._sent = self._place + 1, 0
            yield from self.closed()
            held, self._held, self.kind = self._held, [], ""
            for text in held:
                yield from self._text(*text)

    @abstractmethod
    def begun(self) -> Iterator[Json]: ...

    @abstractmethod
    def opened(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Json]: ...

    @abstractmethod
    def added(self, text: str) -> Iterator[Json]: ...

    @abstractmethod
    def closed(self) -> Iterator[Json]: ...

    @abstractmethod
    def ended(self) -> Iterator[Json]: ...

    @abstractmethod
    def whole(self, events: Sequence[Json]) -> Json:
        """Return the complete answer, built from its events."""

    @abstractmethod
    def error(self, error: Json) -> Json:
        """Return the event for an error in the stream."""


class TranslatedStream(ChatStream):
    """A streamed chat answer, passed on as the events of the agent's API."""

    def __init__(self, translator: Translator) -> None:
        super().__init__(Injection())
        self.rewrites = True
        self._own = translator.own.stream(Injection())
        self._translator = translator

    def take(self, raw: bytes, event: Json) -> bytes:
        if (error := self.read(raw, event)) is None:
            return self._sent(self._translator.feed(event))
        return self._sent([self._translator.error(error if isinstance(error, dict) else {"message": str(error)})])

    def last(self, raw: bytes) -> bytes:
        if self.failure:
            return b""
        if self._own.response() is None:
            raise _unreadable(ValueError("it is empty"))
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
    return UpstreamUnreachable(f"the upstream's answer is not a chat completion: {error!r}"[:1000])
