"""Reads a rollout's calls as chat, whatever their API: the messages that the model was shown, and its answers.

`additions` compares the messages of calls, so that each message is shown once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from ...core.errors import NotFound
from ...core.json_text import loads
from ...core.tools import answers, calls_in, dicts
from ...store.requests import full_calls
from .as_chat.messages import MessagesTranslator, chat_messages, chat_tools
from .as_chat.recorded import Exchange, exchange_of, exchanges_up_to, items_of
from .as_chat.responses import messages_of, messages_shown, tools_of
from .as_chat.translation import MALFORMED, Template, Untranslatable, picked
from .atoms import same_arguments

Json = dict[str, Any]


class ChatMessage(dict[str, Any]):
    """A chat message. If consecutive requests share a message, they share this object."""

    @cached_property
    def identity(self) -> int:
        """Return a digest of role, text and tool calls, but not of call ids, which clients change."""
        called = tuple((call.name, same_arguments(call.arguments)) for call in calls_in(self))
        return hash((str(self.get("role")), body(self).strip(), called))


class ChatTurn(NamedTuple):
    """One call as chat: the messages that the model was `shown`, and its `answer` (empty if it did not answer).

    `unreadable`: why the call cannot be read as chat; its messages are then unchanged.
    """

    shown: list[ChatMessage]
    answer: list[ChatMessage]
    tools: list[Json]
    unreadable: str | None = None

    @property
    def messages(self) -> list[ChatMessage]:
        return [*self.shown, *self.answer]


def chat_turns(calls: Sequence[Json]) -> Iterator[ChatTurn]:
    """Yield a rollout's calls, given in the control API's form, as chat."""
    calls = full_calls(calls, prompts=False)
    reader = _Reader()
    for call in calls:
        if call.get("endpoint") == "responses" and call["status"] == "ok" and isinstance(call["response"], dict):
            exchange = exchange_of(call["request"], call["response"])
            reader.known[exchange.response_id] = exchange
    yield from map(reader.read, calls)


class _Reader:
    def __init__(self) -> None:
        self.known: dict[str, Exchange] = {}  # by response
        # The previous call's messages, most of which come again: by Python's `id`, the message and the tidy one.
        self._made: dict[tuple[int, object], tuple[Json, ChatMessage]] = {}
        self._texts: dict[str, list[Json]] = {"": []}  # of completions: the messages, by all of their text

    def read(self, call: Json) -> ChatTurn:
        request, response = call["request"], call["response"] if isinstance(call["response"], dict) else {}
        try:
            answered = {} if response.get("error") else response
            shown, answer, tools = self._chat(call.get("endpoint", ""), request, answered)
            return ChatTurn(self._as(_tidy, shown), [*map(_tidy, answer)], [*map(_tidy_tool, tools)])
        except NotFound as error:
            reason = error.message
        except MALFORMED as error:
            is_named = isinstance(error, Untranslatable)
            reason = str(error) if is_named else "the request or answer does not have its API's format"
        messages = [*map(ChatMessage, messages_answered(response))]
        return ChatTurn(self._as(ChatMessage, messages_in(request)), messages, [], reason)

    def _as(self, make: Callable[[Json], ChatMessage], messages: list[Json]) -> list[ChatMessage]:
        made = [self._made.get((id(one), make)) or (one, make(one)) for one in messages]
        self._made = {(id(one), make): (one, tidy) for one, tidy in made}
        return [tidy for _, tidy in made]

    def _chat(self, endpoint: str, request: Json, response: Json) -> tuple[list[Json], list[Json], list[Json]]:
        """The messages shown, the answer and the tools. Raises Untranslatable, NotFound or one of MALFORMED."""
        match endpoint:
            case "messages":
                answer = [MessagesTranslator.history(response)] if "content" in response else []
                return chat_messages(request, Template(merges_system=False)), answer, chat_tools(request)
            case "responses":
                if name := next(filter(request.get, ("conversation", "prompt", "background")), None):
                    raise Untranslatable(f"with `{name}`, only the provider has the whole call")
                earlier = items_of(exchanges_up_to(self.known, request.get("previous_response_id")))
                if not isinstance(request["input"], str):
                    request = request | {"input": _visible(request["input"])}
                answer = messages_of(_visible(dicts(response.get("output"))))
                return messages_shown(request, _visible(earlier)), answer, tools_of(request.get("tools") or [])
            case "completions":
                return *self._completions(request, response), []
        messages = request["messages"]
        if any(message.get("function_call") for message in messages):
            raise Untranslatable("a message has a `function_call`, which `tool_calls` replaced")
        return messages, messages_answered(response), request.get("tools") or []

    def _completions(self, request: Json, response: Json) -> tuple[list[Json], list[Json]]:
        """The messages shown and the answer. A prompt that extends an earlier one and its answer is the next turn."""
        prompts = request["prompt"] if isinstance(request["prompt"], list) else [request["prompt"]]
        if len(prompts) != 1 or not isinstance(prompt := prompts[0], str):
            raise Untranslatable("the prompt is not a single text")
        before, answer = max(filter(prompt.startswith, self._texts), key=len), messages_answered(response)
        shown = self._texts[before]
        if rest := prompt[len(before) :]:
            shown = [*shown, {"role": "user", "content": rest}]
        for message in answer:
            message["content"] = message["content"].removeprefix(prompt if request.get("echo") else "")
            if message["content"]:
                self._texts[prompt + message["content"]] = [*shown, message]
        return shown, answer


def _visible(items: Sequence[Json]) -> list[Json]:
    """The items, except reasoning that only the provider can read."""
    return [one for one in items if one.get("type") != "reasoning" or one.get("content") or one.get("summary")]


def _tidy(message: Json) -> ChatMessage:
    """A message with the fields that chat templates read: text as one string, a tool call's arguments as an object."""
    role, content = message["role"], message.get("content") or message.get("refusal") or ""
    if isinstance(content, list) and all(isinstance(part, str) or part.get("type") == "text" for part in content):
        content = text(message)
    tidy = ChatMessage(role="system" if role == "developer" else role, content=content)
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        tidy["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        tidy["tool_calls"] = [_tool_call(call) for call in calls]
    tidy.update(picked(message, "tool_call_id name"))
    return tidy


def _tool_call(call: Json) -> Json:
    """A tool call with its arguments as an object: {} if they are empty, unchanged if they are not a JSON object."""
    if "function" not in call:
        raise Untranslatable(f"a tool call of type {call.get('type')!r} has no function")
    value = given = call["function"].get("arguments")
    with suppress(ValueError):
        value = loads(given or "{}") if isinstance(given, str | None) else given
    function = {"name": call["function"]["name"], "arguments": value if isinstance(value, dict) else given}
    return {"id": call.get("id"), "type": "function", "function": function}


def _tidy_tool(tool: Json) -> Json:
    """A tool with name, description and parameters first, because templates show fields in their order."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    return tool | {"function": picked(function, "name description parameters") | function}


def messages_in(request: Json) -> list[Json]:
    """Return the messages of a request of any API. System prompts and plain texts become messages."""
    given = request.get("messages", request.get("input", request.get("prompt", [])))
    if dicts(given) != given:
        given = [{"role": "user", "content": given}]
    first = request.get("system") or request.get("instructions")
    return [*([{"role": "system", "content": first}] if first else []), *given]


def messages_answered(response: Json) -> list[Json]:
    """Return the messages of an answer's first choice; [] if it has none."""
    return next(iter(answers(response)), [])


def additions(turns: Iterable[ChatTurn]) -> Iterator[tuple[ChatTurn, list[ChatMessage]]]:
    """Yield each turn with the messages shown after the longest beginning that it shares with an earlier turn."""
    earlier = set[int]()
    for turn in turns:
        digests = [*beginnings(turn.messages)]
        shared = next((i for i in range(len(turn.shown), 0, -1) if digests[i] in earlier), 0)
        yield turn, turn.shown[shared:]
        earlier.update(digests)


def beginnings(messages: Iterable[ChatMessage]) -> Iterator[int]:
    """Yield a digest of every beginning of a conversation, from the empty one to the whole conversation."""
    digest = hash(())
    yield digest
    for message in messages:
        digest = hash((digest, message.identity))
        yield digest


def body(message: Json) -> str:
    """Return the message's text; for other items, all fields as JSON."""
    return text(message) if "role" in message else json.dumps(message)


def text(message: Json) -> str:
    """Return the message's text. Content parts that are not text show their type."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    return "\n".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in parts)
