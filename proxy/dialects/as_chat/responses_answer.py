"""Turns chat answers, whole or in chunks, into answers and events of Responses, with every field of vLLM's own route.

In a stream, one output item at a time is open.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .responses_items import CUSTOM_INPUT, Tools

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_REASONING = ("context", "effort", "generate_summary", "mode", "summary")
_SCHEMA = ("name", "schema", "type", "description", "strict")
# vLLM samples with no lower temperature, but for 0.
_LEAST_TEMPERATURE = 1e-2

# What is before the text of the one argument of a custom tool, and as much as there is of it without a cut escape.
_BEFORE_INPUT = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_INPUT = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*', re.DOTALL)


class ResponsesReply:
    """The response to one request: the fields that it repeats of the request, and the model's answer."""

    def __init__(self, body: Json, tools: Tools) -> None:
        self.tools = tools
        self.id = body.get("request_id") or new_id("resp")
        self.thoughts = body.get("include_reasoning") is not False
        # With hidden reasoning vLLM hides the tokens too: they would show it.
        self.logprobs = LOGPROBS in (body.get("include") or ()) and self.thoughts
        self._body = body

    def response(self, chat: Json, output: list[Json], finish: str | None = None) -> Json:
        """Return the response object. `chat`: the answer, or its chunks' fields; without `finish` it is in progress."""
        usage = _usage(chat.get("usage")) if finish else None
        limit = {"max_output_tokens": usage["output_tokens"]} if usage and finish == "length" else {}
        return (
            _repeated(self._body, self.tools)
            | limit
            | {
                "id": self.id,
                "created_at": chat["created"],
                "model": chat["model"],
                "output": output,
                "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
                "status": _status(finish),
                "usage": usage,
                "kv_transfer_params": chat.get("kv_transfer_params"),
                "ec_transfer_params": chat.get("ec_transfer_params"),
                **({"metrics": metrics} if (metrics := chat.get("metrics")) else {}),
            }
        )

    def answer(self, chat: Json) -> Json:
        """Return a non-streamed chat answer as a response."""
        choice = chat["choices"][0]
        return self.response(chat, self._output(choice), self._finish(choice["finish_reason"], chat["usage"]))

    def call(self, item_id: str, call_id: str, name: str, arguments: str, status: str) -> Json:
        """Return the item of a tool call; of a custom tool, `arguments` are its entire input."""
        namespace, own = self.tools.own_name(name)
        if self.tools.is_custom(name):
            item = {"call_id": call_id, "input": arguments, "name": name, "type": "custom_tool_call", "id": item_id}
            return item | {"caller": None, "namespace": None}
        item = {"arguments": arguments, "call_id": call_id, "name": own, "type": "function_call", "id": item_id}
        return item | {"caller": None, "namespace": namespace, "status": status}

    def _output(self, choice: Json) -> list[Json]:
        message = choice["message"]
        items = []
        if self.thoughts and (reasoning := message.get("reasoning")):
            items.append(reasoning_item(new_id("rs"), reasoning, None))
        if content := message.get("content"):
            items.append(message_item(new_id("msg"), [text_part(content, logprobs(choice) if self.logprobs else None)]))
        items.extend(self._called(call) for call in message.get("tool_calls") or ())
        return items

    def _called(self, call: Json) -> Json:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        custom = self.tools.is_custom(name)
        arguments = custom_input(arguments) if custom else arguments
        return self.call(new_id("ctc" if custom else "fc"), call["id"], name, arguments, "completed")

    def _finish(self, finish: str, usage: Json) -> str:
        """Why it ended. Of an answer with calls, chat says only `tool_calls`, also where the limit cut it."""
        limit = self._body.get("max_output_tokens")
        return "length" if limit and finish == "tool_calls" and usage["completion_tokens"] >= limit else finish


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(8)}"


def message_item(item_id: str, parts: list[Json], status: str = "completed") -> Json:
    item = {"id": item_id, "content": parts, "role": "assistant", "status": status, "type": "message"}
    return item | {"phase": None}


def text_part(text: str, tokens: list[Json] | None) -> Json:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": tokens}


def reasoning_item(item_id: str, text: str | None, status: str | None) -> Json:
    content = None if text is None else [{"text": text, "type": "reasoning_text"}]
    item = {"id": item_id, "summary": [], "type": "reasoning", "content": content}
    return item | {"encrypted_content": None, "status": status}


def logprobs(choice: Json) -> list[Json]:
    """Return the log-probabilities of a choice or chunk in this API's shape."""
    return [
        _token(token) | {"top_logprobs": [_token(top) for top in token.get("top_logprobs") or ()]}
        for token in (choice.get("logprobs") or {}).get("content") or ()
    ]


def custom_input(arguments: str) -> str:
    """Return a custom tool's input: the one argument, or the entire text where there is none."""
    try:
        value = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, TypeError, LookupError):
        return arguments
    return value if isinstance(value, str) else arguments


def _token(token: Json) -> Json:
    text = token["token"]
    return {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": token.get("logprob", -9999.0)}


def _status(finish: str | None) -> str:
    if finish is None:
        return "in_progress"
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Json | None) -> Json | None:
    """Usage; counts of the cache that the server does not send are 0."""
    if usage is None:
        return None
    cache, spent = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": cache.get("cached_tokens") or 0,
            "cache_write_tokens": cache.get("created_cache_tokens") or 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": spent.get("reasoning_tokens") or 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage["total_tokens"],
    }


def _repeated(body: Json, tools: Tools) -> Json:
    """The fields of its request that a response repeats, in vLLM's order; those only known later are null."""
    given = {name: value for name, value in body.items() if value is not None}
    temperature, top_p = _sampled(given)
    return {
        "id": None,
        "created_at": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "metadata": given.get("metadata"),
        "model": None,
        "object": "response",
        "output": [],
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "temperature": temperature,
        "tool_choice": _tool_choice(given, tools),
        "tools": tools.repeated(),
        "top_p": top_p,
        "background": False,
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": given.get("max_tool_calls"),
        "previous_response_id": given.get("previous_response_id"),
        "prompt": None,
        "reasoning": _filled(given.get("reasoning"), _REASONING),
        "service_tier": given.get("service_tier", "auto"),
        "status": None,
        "text": _text(given.get("text")),
        "top_logprobs": given.get("top_logprobs", 0) if LOGPROBS in given.get("include", ()) else None,
        "truncation": given.get("truncation", "disabled"),
        "usage": None,
        "user": given.get("user"),
        "presence_penalty": float(given.get("presence_penalty", 0)),
        "frequency_penalty": float(given.get("frequency_penalty", 0)),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def _sampled(given: Json) -> tuple[float, float]:
    """The temperature and top_p that vLLM samples with; without a model's own defaults, which chat does not show."""
    temperature = float(given.get("temperature", 1))
    if temperature == 0:
        return temperature, 1.0
    return max(temperature, _LEAST_TEMPERATURE), float(given.get("top_p", 1))


def _tool_choice(given: Json, tools: Tools) -> Any:
    choice = tools.named(given.get("tool_choice", "auto"))
    return choice if given.get("tools") or choice != "auto" else "none"


def _text(text: Json | None) -> Json | None:
    if text is None:
        return None
    shape = text.get("format")
    if shape and shape["type"] == "json_schema":
        shape = _filled(shape, _SCHEMA)
    return {"format": shape, "verbosity": text.get("verbosity")}


def _filled(value: Json | None, names: tuple[str, ...]) -> Json | None:
    return None if value is None else dict.fromkeys(names) | value


class ResponsesStreamTranslation:
    """One stream. Its chunks may come with more than the agent asked for, and without text or calls."""

    def __init__(self, reply: ResponsesReply) -> None:
        self._reply = reply
        self._chat: Json = {}
        self._finish = "stop"
        self._items: list[Json] = []
        self._open: OpenItem | None = None
        self._sent = 0

    def feed(self, chunk: Json) -> Iterable[Json]:
        if error := chunk.get("error"):
            return self._numbered([_error(error)])
        return self._numbered([*self._begun(chunk), *self._deltas(chunk)])

    def end(self) -> Iterable[Json]:
        closed = self._closed()
        response = self._reply.response(self._chat, self._items, self._finish)
        return self._numbered([*closed, {"type": "response.completed", "response": response}])

    def _numbered(self, events: list[Json]) -> list[Json]:
        numbered = [event | {"sequence_number": self._sent + number} for number, event in enumerate(events)]
        self._sent += len(events)
        return numbered

    def _begun(self, chunk: Json) -> list[Json]:
        known = bool(self._chat)
        self._chat |= {name: value for name, value in chunk.items() if value is not None}
        if known:
            return []
        response = self._reply.response(self._chat, [])
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _deltas(self, chunk: Json) -> Iterator[Json]:
        for choice in chunk["choices"]:
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice["delta"]
            if self._reply.thoughts and (reasoning := delta.get("reasoning")) is not None:
                yield from self._added(OpenReasoning, reasoning)
            if content := delta.get("content"):
                tokens = logprobs(choice) if self._reply.logprobs else []
                yield from self._added(OpenMessage, content, tokens)
            for index, parts in _by_index(delta.get("tool_calls") or ()).items():
                yield from self._called(index, parts)

    def _added(
        self, kind: type[OpenReasoning] | type[OpenMessage], text: str, tokens: Sequence[Json] = ()
    ) -> list[Json]:
        item = self._open
        if isinstance(item, kind):
            return item.add(text, tokens)
        closed = self._closed()
        item = self._open = kind(len(self._items))
        return [*closed, *item.open(), *item.add(text, tokens)]

    def _called(self, index: Any, parts: list[Json]) -> list[Json]:
        arguments = "".join(part["function"].get("arguments") or "" for part in parts)
        item = self._open
        if isinstance(item, OpenCall) and item.call_index == index:
            return item.add(arguments)
        closed = self._closed()
        item = self._open = OpenCall(len(self._items), self._reply, index, parts[0])
        return [*closed, *item.open(), *item.add(arguments)]

    def _closed(self) -> list[Json]:
        if self._open is None:
            return []
        events = self._open.close()
        self._items.append(events[-1]["item"])
        self._open = None
        return events


def _by_index(calls: Iterable[Json]) -> dict[Any, list[Json]]:
    """A chunk's parts of calls, by the place of the call."""
    parts: dict[Any, list[Json]] = {}
    for call in calls:
        if call.get("function") is not None:
            parts.setdefault(call.get("index"), []).append(call)
    return parts


def _error(error: Any) -> Json:
    fields = error if isinstance(error, dict) else {"message": str(error)}
    code = fields.get("code")
    message = str(fields.get("message"))
    return {"type": "error", "code": None if code is None else str(code), "message": message, "param": None}


class OpenItem(ABC):
    """An item at its place in the output. The last of the events by which it closes has the complete item."""

    def __init__(self, place: int, kind: str) -> None:
        self.id = new_id(kind)
        self.text = ""
        self._place = place

    @abstractmethod
    def open(self) -> list[Json]: ...

    @abstractmethod
    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]: ...

    @abstractmethod
    def close(self) -> list[Json]: ...

    def event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._place, **fields}

    def item_event(self, kind: str, item: Json) -> Json:
        return {"type": f"response.output_item.{kind}", "output_index": self._place, "item": item}


class OpenMessage(OpenItem):
    def __init__(self, place: int) -> None:
        super().__init__(place, "msg")
        self._tokens: list[Json] = []

    def open(self) -> list[Json]:
        part = self.event("content_part.added", content_index=0, part=text_part("", []))
        return [self.item_event("added", message_item(self.id, [], "in_progress")), part]

    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]:
        self.text += text
        self._tokens += tokens
        return [self.event("output_text.delta", content_index=0, delta=text, logprobs=list(map(_brief, tokens)))]

    def close(self) -> list[Json]:
        part = text_part(self.text, self._tokens or None)
        return [
            self.event("output_text.done", content_index=0, text=self.text, logprobs=[]),
            self.event("content_part.done", content_index=0, part=part),
            self.item_event("done", message_item(self.id, [part])),
        ]


class OpenReasoning(OpenItem):
    def __init__(self, place: int) -> None:
        super().__init__(place, "rs")

    def open(self) -> list[Json]:
        part = self.event("content_part.added", content_index=0, part=_thought(""))
        return [self.item_event("added", reasoning_item(self.id, None, "in_progress")), part]

    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]:
        self.text += text
        return [self.event("reasoning_text.delta", content_index=0, delta=text)]

    def close(self) -> list[Json]:
        return [
            self.event("reasoning_text.done", content_index=0, text=self.text),
            self.event("content_part.done", content_index=0, part=_thought(self.text)),
            self.item_event("done", reasoning_item(self.id, self.text, "completed")),
        ]


class OpenCall(OpenItem):
    """A call of a function or of a custom tool. The input of a custom tool is read out of its arguments."""

    def __init__(self, place: int, reply: ResponsesReply, index: Any, call: Json) -> None:
        """`index`: its place among the calls of the chat answer; `call`: its first part."""
        self.call_index = index
        self._reply = reply
        self._name = str(call["function"].get("name") or "")
        self._call_id = call.get("id") or f"chatcmpl-tool-{new_id('')[1:]}"
        self._custom = reply.tools.is_custom(self._name)
        self._input = ""
        self._read = 0  # of the arguments, up to what `_input` has
        super().__init__(place, "ctc" if self._custom else "fc")

    def open(self) -> list[Json]:
        return [self.item_event("added", self._item("", "in_progress"))]

    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]:
        self.text += text
        if self._custom:
            return self._more_input(self._begun_input())
        return [self.event("function_call_arguments.delta", delta=text)] if text else []

    def close(self) -> list[Json]:
        if self._custom:
            text = custom_input(self.text)
            events = [*self._more_input(text), self.event("custom_tool_call_input.done", input=text)]
            return [*events, self.item_event("done", self._item(text, "completed"))]
        name = self._reply.tools.own_name(self._name)[1]
        done = self.event("function_call_arguments.done", arguments=self.text, name=name)
        return [done, self.item_event("done", self._item(self.text, "completed"))]

    def _item(self, arguments: str, status: str) -> Json:
        return self._reply.call(self.id, self._call_id, self._name, arguments, status)

    def _begun_input(self) -> str:
        """As much of a custom tool's input as is certain. Each character is read once."""
        arguments = self.text.rstrip()  # as vLLM: blanks wait for what follows
        if not self._read and (before := _BEFORE_INPUT.match(arguments)):
            self._read = before.end()
        found = _INPUT.match(arguments, self._read) if 0 < self._read < len(arguments) else None
        if found is None or not found[0]:
            return self._input
        try:
            more: str = json.loads(f'"{found[0]}"')
        except ValueError:
            self._read = -1  # it is no JSON: read no more
            return ""
        self._read = found.end()
        if "\ud800" <= more[-1] <= "\udbff":  # its other half may follow
            self._read -= 1 if found[0].endswith(more[-1]) else len("\\ud800")
            more = more[:-1]
        return self._input + more

    def _more_input(self, text: str) -> list[Json]:
        """A delta with the new part of the input. Sent text cannot be taken back: changed input is sent anew."""
        before, self._input = self._input, text
        if text == before:
            return []
        return [self.event("custom_tool_call_input.delta", delta=text.removeprefix(before))]


def _thought(text: str) -> Json:
    return {"text": text, "type": "reasoning_text"}


def _brief(token: Json) -> Json:
    """A token's log-probability as a stream has it: without bytes."""
    return {
        "token": token["token"],
        "logprob": token["logprob"],
        "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in token["top_logprobs"]],
    }
