"""Reads the calls of a rollout as chat, whatever their API: the messages that the model was shown, and its answers.

`additions` compares the messages of calls, so that each is shown once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...core.errors import NotFound
from ...core.json_text import loads
from ...core.tools import answers, dicts
from ...store.requests import full_calls
from .as_chat.messages import MessagesTranslator, chat_messages, chat_tools
from .as_chat.responses import messages_of, messages_shown, tools_of
from .as_chat.translation import Untranslatable
from .earlier import Exchange, exchange_of, exchanges_up_to, items_of

Json = dict[str, Any]

_KEPT = ("tool_call_id", "name")
_OF_TOOL = ("name", "description", "parameters")
# With these a request refers to what only the provider has.
_ELSEWHERE = ("conversation", "prompt", "background")

Message = dict[str, Any]
# The digests of a conversation's messages, by `id`. It has the messages, too: so no other has their `id`.
Digests = dict[int, tuple[Message, int]]


class ChatTurn(NamedTuple):
    """One call as chat: the messages that the model was `shown`, and its `answer` (empty if it did not answer).

    `unreadable`: why it is no chat; then the messages are as the request has them.
    """

    shown: list[Json]
    answer: list[Json]
    tools: list[Json]
    unreadable: str | None = None

    @property
    def messages(self) -> list[Json]:
        return [*self.shown, *self.answer]


def chat_turns(calls: Sequence[Json]) -> Iterator[ChatTurn]:
    """Yield the calls of one rollout, as the control API has them, as chat; all together take much memory."""
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
        # Of the call before, which mostly goes on: each message by its `id`, and the tidy one.
        self._tidied: dict[int, tuple[Json, Json]] = {}
        self._texts: list[tuple[str, list[Json]]] = []  # of completions: all text so far, and the messages of it

    def read(self, call: Json) -> ChatTurn:
        make = {"messages": _messages, "responses": self._responses, "completions": self._completions}
        request, response = call["request"], call["response"] if isinstance(call["response"], dict) else {}
        try:
            turn = make.get(call.get("endpoint", ""), _chat)(request, {} if response.get("error") else response)
            self._tidied = {id(one): self._tidied.get(id(one)) or (one, _tidy(one)) for one in turn.shown}
            shown = [self._tidied[id(one)][1] for one in turn.shown]
            return ChatTurn(shown, [*map(_tidy, turn.answer)], [*map(_tidy_tool, turn.tools)])
        except Untranslatable as untranslatable:
            reason = str(untranslatable)
        except NotFound as error:
            reason = error.message
        except (LookupError, TypeError, ValueError, AttributeError):
            reason = "its request or answer is not as its API says"
        return ChatTurn(messages_in(request), messages_answered(response), [], reason)

    def _responses(self, request: Json, response: Json) -> ChatTurn:
        given = {name: value for name, value in request.items() if value is not None}
        if name := next((name for name in _ELSEWHERE if given.get(name)), None):
            raise Untranslatable(f"`{name}` refers to what only the provider has")
        earlier = items_of(exchanges_up_to(self.known, given.get("previous_response_id")))
        if not isinstance(given["input"], str):
            given["input"] = [*_visible(given["input"])]
        answer = messages_of(_visible(dicts(response.get("output"))))
        return ChatTurn(messages_shown(given, [*_visible(earlier)]), answer, tools_of(given.get("tools", [])))

    def _completions(self, request: Json, response: Json) -> ChatTurn:
        """A prompt that extends an earlier prompt and its answer is the next turn of the same conversation."""
        prompt = _prompt(request["prompt"])
        begun = [known for known in self._texts if prompt.startswith(known[0])]
        before, messages = max(begun, key=lambda known: len(known[0]), default=("", []))
        rest = prompt[len(before) :]
        shown = [*messages, {"role": "user", "content": rest}] if rest else messages
        texts = [choice["text"] for choice in dicts(response.get("choices"))[:1]]
        texts = [text.removeprefix(prompt) if request.get("echo") else text for text in texts]
        answer = [{"role": "assistant", "content": text} for text in texts]
        self._texts += [(prompt + text, [*shown, {"role": "assistant", "content": text}]) for text in texts if text]
        return ChatTurn(shown, answer, [])


def _chat(request: Json, response: Json) -> ChatTurn:
    messages = request["messages"]
    if any(message.get("function_call") for message in messages):
        raise Untranslatable("`function_call`, which `tool_calls` replaced")
    return ChatTurn(messages, [c["message"] for c in dicts(response.get("choices"))[:1]], request.get("tools") or [])


def _messages(request: Json, response: Json) -> ChatTurn:
    answer = [MessagesTranslator.history(response)] if "content" in response else []
    return ChatTurn(chat_messages(request, False), answer, chat_tools(request) or [])


def _prompt(prompt: Any) -> str:
    texts = [prompt] if isinstance(prompt, str) else prompt
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise Untranslatable("a prompt of tokens, or of several texts")
    return str(texts[0])


def _visible(items: Sequence[Json]) -> Iterator[Json]:
    """The items without the thoughts that a provider keeps to itself."""
    for item in items:
        if item.get("type") != "reasoning" or item.get("content") or item.get("summary"):
            yield item


def _tidy(message: Json) -> Json:
    """A message with the fields that chat templates know: text in one piece, a tool call's arguments as an object."""
    role = message["role"]
    content = _content(message.get("content") or message.get("refusal"))
    tidy: Json = {"role": "system" if role == "developer" else role, "content": content}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        tidy["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        tidy["tool_calls"] = [_tool_call(call) for call in calls]
    return tidy | {name: message[name] for name in _KEPT if message.get(name)}


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content or ""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    only_text = all(part.get("type") in ("text", "refusal") for part in parts)
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in parts) if only_text else parts


def _tool_call(call: Json) -> Json:
    if "function" not in call:
        raise Untranslatable(f"a call of a tool of type {call.get('type')}")
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(text: Any) -> Any:
    """Arguments as an object; as they are if the model wrote no JSON object."""
    with suppress(ValueError):
        value = loads(text or "{}") if isinstance(text, str | None) else text
        return value if isinstance(value, dict) else text
    return text


def _tidy_tool(tool: Json) -> Json:
    """A tool with its fields in one order: templates show them as they come."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    ordered = [name for name in _OF_TOOL if name in function]
    return tool | {"function": {name: function[name] for name in dict.fromkeys([*ordered, *function])}}


def messages_in(request: Json) -> list[Json]:
    """Return the messages of a request of any API, as they are."""
    given = request.get("messages", request.get("input", request.get("prompt", [])))
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        given = [{"role": "user", "content": given}]
    first = request.get("system") or request.get("instructions")
    return [*([{"role": "system", "content": first}] if first else []), *given]


def messages_answered(response: Json) -> list[Json]:
    """Return the messages of an answer's first choice, as they are."""
    return [message for answer in answers(response)[:1] for message in answer]


def additions(turns: Iterable[ChatTurn]) -> Iterator[tuple[ChatTurn, list[Message]]]:
    """Yield each turn with its new messages: all after the longest beginning that it shares with an earlier one."""
    earlier, known = set[int](), Digests()
    for turn in turns:
        digests = [*beginnings(turn.messages, known)]
        shared = next((i for i in range(len(turn.shown), 0, -1) if digests[i] in earlier), 0)
        yield turn, turn.shown[shared:]
        earlier.update(digests)


def beginnings(messages: Sequence[Message], known: Digests) -> Iterator[int]:
    """Yield a digest of every beginning of a conversation, from the empty one to all of it.

    `known` is that of the conversation before, which this one mostly continues.
    """
    now = {id(one): known.get(id(one)) or (one, hash(core(one))) for one in messages}
    known.clear()
    known.update(now)
    digest = hash(())
    yield digest
    for message in messages:
        digest = hash((digest, now[id(message)][1]))
        yield digest


def core(message: Message) -> tuple[Any, ...]:
    """Return the identity of a message. Clients add and drop empty fields, and give calls other ids."""
    tools = tuple((str(one.get("name")), json.dumps(one.get("arguments"), sort_keys=True)) for one in called(message))
    return str(message.get("role")), body(message).strip(), tools


def called(message: Message) -> list[Message]:
    """Return the functions that a message calls."""
    tools = dicts(message.get("tool_calls"))
    return [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]


def body(message: Message) -> str:
    """Return the message's text; for other items all fields, as JSON."""
    return text(message) if "role" in message else json.dumps(message)


def text(message: Message) -> str:
    """Return the message's text. Content parts that are no text show their type."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    return "\n".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in parts)
