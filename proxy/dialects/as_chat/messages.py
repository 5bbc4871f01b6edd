"""Translates requests of /v1/messages, Anthropic's API, into chat requests, as vLLM 0.32's own route does.

Fields are read as strictly as that route reads them: requests that it refuses are sent to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.values import as_read
from .messages_answer import MessagesEvents, error_of, message_of
from .translation import EFFORTS, Template, TemplateUnknown, Untranslatable

Json = dict[str, Any]

_NUMBERS = {"temperature": "a number", "top_p": "a number", "top_k": "an integer"}
# vLLM's own fields, of which both routes make the same.
_ALIKE = {
    "watermarking": "true or false", "cache_salt": "text", "kv_transfer_params": "an object",
    "ec_transfer_params": "an object", "vllm_xargs": "an object", "chat_template_kwargs": "an object",
}  # fmt: skip
_LEAST_BUDGET = 1024

_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "true or false": (bool,),
    "an integer": (int,),
    "a number": (int, float),
    "an object": (dict,),
    "a list": (list,),
    "text or a list": (str, list),
}

CHANGES = ("tool_addition", "tool_removal")

# Claude Code's first system block. It changes with every request, so vLLM leaves it out.
_BILLING = "x-anthropic-billing-header"
_BLOCKS = frozenset({
    "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking", *CHANGES,
})  # fmt: skip
_TEXTS = ("text", "id", "tool_use_id", "name", "tool_name", "thinking", "signature", "data")

_WORDS = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTranslator:
    def __init__(self, template: Template = Template()) -> None:
        """`template`: the known template of the server that answers."""
        self._template = template

    def request(self, body: Json, earlier: Sequence[Json] = ()) -> MessagesTranslation:
        return MessagesTranslation(chat_request(as_read(body), self._template))

    def history_message(self, answer: Json) -> Json:
        try:
            return chat_message(answer.get("content"))
        except Untranslatable:
            return {"role": "assistant"}


class MessagesTranslation:
    def __init__(self, chat: Json) -> None:
        self.chat = chat

    def answer(self, chat: Json) -> Json:
        return message_of(chat)

    def stream(self) -> MessagesEvents:
        return MessagesEvents()

    def refused(self, error: Json) -> Json:
        """Return the chat route's refusal as vLLM's own route words it."""
        return error_of(error.get("error"))


def chat_request(body: Json, template: Template) -> Json:
    """Return a Messages request as a chat request; raise Untranslatable."""
    if not required(body, "model", "text"):
        raise Untranslatable("`model` is empty")
    most = required(body, "max_tokens", "an integer")
    if most <= 0:
        raise Untranslatable("`max_tokens` is not positive")
    optional(body, "metadata", "an object")
    chat = {"model": body["model"], "messages": chat_messages(body, template.merges_system)}
    # Both, as vLLM does: which of them it names in a refusal depends on it.
    chat |= {"max_tokens": most, "max_completion_tokens": most}
    for name, kind in (_NUMBERS | _ALIKE).items():
        if (value := optional(body, name, kind)) is not None:
            chat[name] = value
    chat |= _stop(body) | _streamed(body) | _output(body) | _thinking(body, template.disabled_effort)
    return chat | chat_tools(body, template.ignores_no_tools)


def _stop(body: Json) -> Json:
    stop = optional(body, "stop_sequences", "a list")
    if stop and not all(isinstance(text, str) for text in stop):
        raise Untranslatable("`stop_sequences` are not texts")
    return {} if stop is None else {"stop": stop}


def _streamed(body: Json) -> Json:
    if not optional(body, "stream", "true or false"):
        return {}
    return {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def _output(body: Json) -> Json:
    config = optional(body, "output_config", "an object") or {}
    effort, form = optional(config, "effort", "text"), optional(config, "format", "an object") or {}
    out: Json = {}
    if effort is not None:
        if effort not in EFFORTS:
            raise Untranslatable(f"vLLM does not know the effort {effort!r}")
        out["reasoning_effort"] = effort
    if form.get("type", "json_schema") != "json_schema":
        raise Untranslatable(f"vLLM does not know the output format {form['type']!r}")
    if schema := optional(form, "schema", "an object"):
        out["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    return out


def _thinking(body: Json, disabled_effort: str | None) -> Json:
    thinking = optional(body, "thinking", "an object")
    kind = None if thinking is None else thinking.get("type")
    if thinking is None or kind == "adaptive":
        return {}
    if kind == "enabled":
        budget = required(thinking, "budget_tokens", "an integer")
        if not _LEAST_BUDGET <= budget < body["max_tokens"]:
            raise Untranslatable("`thinking.budget_tokens` is below 1024, or not below `max_tokens`")
        return {"thinking_token_budget": budget}
    if kind == "disabled" and disabled_effort is not None:
        return {"reasoning_effort": disabled_effort}
    if kind == "disabled":
        raise TemplateUnknown("it is not known how the server turns thinking off")
    raise Untranslatable(f"vLLM does not know the type of thinking {kind!r}")


def optional(part: Json, name: str, kind: str) -> Any:
    """Return a field, None if it is absent; raise Untranslatable if it is not of its kind."""
    value = part.get(name)
    if value is None or _is(value, kind):
        return value
    raise Untranslatable(f"`{name}` is not {kind}")


def required(part: Json, name: str, kind: str) -> Any:
    """Return a field; raise Untranslatable if it is absent or not of its kind."""
    value = optional(part, name, kind)
    if value is None:
        raise Untranslatable(f"`{name}` is missing")
    return value


def objects(values: Any, what: str) -> list[Json]:
    """Return a list of objects; raise Untranslatable if it is none."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise Untranslatable(f"{what} are not objects in a list")
    return values


def _is(value: Any, kind: str) -> bool:
    # JSON's true is no number, Python's is.
    return isinstance(value, _KINDS[kind]) and (kind == "true or false" or not isinstance(value, bool))


def chat_messages(body: Json, merges_system: bool | None) -> list[Json]:
    """Return the chat messages of a request; raise Untranslatable.

    `merges_system`: whether the server moves all system messages to the front; None if that is not known.
    """
    messages = objects(body.get("messages"), "messages")
    for message in messages:
        _check(message)
    first = _system_texts(optional(body, "system", "text or a list"))
    if merges_system is not None:
        return _converted(first, messages, merges_system)
    merged, in_place = _converted(first, messages, True), _converted(first, messages, False)
    if merged != in_place:
        raise TemplateUnknown("a system message is inside the conversation, and where the server puts it is unknown")
    return merged


def chat_message(content: Any) -> Json:
    """Return the chat message for an assistant message of this content; raise Untranslatable."""
    message = {"role": "assistant", "content": content}
    _check(message)
    return _conversation_message(message)[-1]


def _check(message: Json) -> None:
    if message.get("role") not in ("user", "assistant", "system"):
        raise Untranslatable(f"a message has the role {message.get('role')!r}")
    content = required(message, "content", "text or a list")
    if isinstance(content, list):
        _check_blocks(content, message["role"])


def _check_blocks(content: list[Any], role: str) -> None:
    """Raise Untranslatable if these are no content blocks that vLLM knows."""
    for block in objects(content, "content blocks"):
        if block.get("type") not in _BLOCKS:
            raise Untranslatable(f"vLLM does not take content blocks of type {block.get('type')!r}")
        if block["type"] in CHANGES and role != "system":
            raise Untranslatable(f"a block of type {block['type']} is not in a system message")
        for name in _TEXTS:
            optional(block, name, "text")
        for name in ("source", "input"):
            optional(block, name, "an object")
        optional(block, "is_error", "true or false")
        optional(block, "content", "text or a list")


def _converted(first: list[str], messages: list[Json], merges_system: bool) -> list[Json]:
    later = [text for message in messages if message["role"] == "system" if (text := _inline_text(message))]
    system = "".join([*first, *later] if merges_system else first)
    out: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        if message["role"] != "system":
            out += _conversation_message(message)
        elif not merges_system and (text := _inline_text(message)):
            out.append({"role": "system", "content": text})
    return out


def _system_texts(system: Any) -> list[str]:
    if not system:
        return []
    if isinstance(system, str):
        return [system]
    _check_blocks(system, "")
    return _texts(system)


def _inline_text(message: Json) -> str:
    content = message["content"]
    if isinstance(content, str):
        return "" if content.startswith(_BILLING) else content
    return "".join(_texts(content))


def _texts(blocks: list[Json]) -> list[str]:
    texts = [block.get("text") or "" for block in blocks if block["type"] == "text"]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _conversation_message(message: Json) -> list[Json]:
    """The chat messages for one of the user or the assistant: tool results come before the other blocks."""
    if isinstance(message["content"], str):
        return [{"role": message["role"], "content": message["content"]}]
    collected = _Collected(message["role"])
    for block in message["content"]:
        collected.add(block)
    own = collected.message()
    return collected.results if own is None else [*collected.results, own]


@dataclass
class _Collected:
    """The blocks of one message, sorted into the places that they have in chat."""

    role: str
    results: list[Json] = field(default_factory=list)
    parts: list[Json] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def add(self, block: Json) -> None:
        kind = block["type"]
        if kind == "text" and block.get("text"):
            self.parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            self.parts.append(_image(block["source"]))
        elif kind == "thinking" and block.get("thinking") is not None:
            self.reasoning.append(block["thinking"])
        elif kind == "tool_use":
            self.calls.append(_call(block))
        elif kind == "tool_result" and self.role == "user":
            self.results += _results(block)
        elif kind == "tool_result":
            result = str(block["content"]) if block.get("content") else ""
            self.parts.append({"type": "text", "text": f"Tool result: {result}"})

    def message(self) -> Json | None:
        """Return the message itself, None if nothing is left of it."""
        message: Json = {"role": self.role}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.parts:
            only_text = len(self.parts) == 1 and self.parts[0]["type"] == "text"
            message["content"] = self.parts[0]["text"] if only_text else self.parts
        return None if self.role == "user" and not self.parts else message


def _call(block: Json) -> Json:
    if not block.get("id"):
        raise Untranslatable("a tool_use block has no id")
    # With the standard library's blanks: a template may show the text as it is.
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _results(block: Json) -> list[Json]:
    """The chat messages for a tool's result: its text, then its images, then the tools that it names."""
    content = block.get("content") or ""
    items = [] if isinstance(content, str) else objects(content, "a tool result's blocks")
    texts = [required(item, "text", "text") for item in items if item.get("type") == "text" and "text" in item]
    images = [_image(required(item, "source", "an object")) for item in items if item.get("type") == "image"]
    names = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    out = [answer | {"content": content if isinstance(content, str) else "\n".join(texts)}]
    if images := [image for image in images if image["image_url"]["url"]]:
        out.append({"role": "user", "content": images})
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        out.append(answer | {"content": references})
    return out


def _image(source: Json) -> Json:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat_tools(body: Json, ignores_no_tools: bool | None) -> Json:
    """Return the tool fields of a chat request; raise Untranslatable.

    `ignores_no_tools`: whether an empty list is as none to the server's template, None if that is not known.
    """
    given = None if body.get("tools") is None else objects(body["tools"], "tools")
    in_effect = _in_effect(given, list(_changes(body["messages"])))
    if in_effect == [] and not ignores_no_tools:
        raise (TemplateUnknown if ignores_no_tools is None else Untranslatable)("the list of tools is empty")
    tools = [_tool(tool) for tool in in_effect or ()]
    # The chat route refuses an empty list. Null is not what the route takes for an absent choice.
    return ({"tools": tools} if tools else {}) | _choice(body, [tool["function"]["name"] for tool in tools])


def _changes(messages: list[Json]) -> Iterator[tuple[str, Json]]:
    for message in messages:
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] in CHANGES:
                yield block["type"], required(block, "tool", "an object")


def _in_effect(given: list[Json] | None, changes: list[tuple[str, Json]]) -> list[Json] | None:
    """The tools at the end of the conversation."""
    if not changes:
        return given
    tools = {required(tool, "name", "text"): tool for tool in given or ()}
    removed: dict[str, bool] = {}
    for kind, change in changes:
        if kind == "tool_addition" and change.get("type") == "tool_definition":
            tool = required(change, "definition", "an object")
            tools[required(tool, "name", "text")] = tool
        elif change.get("type") == "tool_reference" and change.get("name") in tools:
            tool = tools[change["name"]]
            if kind == "tool_addition":
                tools[tool["name"]] = tool | {"defer_loading": None}
        else:
            raise Untranslatable("a tool that is added or removed is unknown")
        removed[tool["name"]] = kind == "tool_removal"
    return [tool for name, tool in tools.items() if not removed.get(name)]


def _tool(tool: Json) -> Json:
    schema = required(tool, "input_schema", "an object")
    function = {"name": required(tool, "name", "text"), "parameters": {**schema, "type": schema.get("type", "object")}}
    for name, kind in {"description": "text", "strict": "true or false", "defer_loading": "true or false"}.items():
        if (value := optional(tool, name, kind)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _choice(body: Json, names: list[str]) -> Json:
    choice = optional(body, "tool_choice", "an object")
    if choice is None:
        return {"tool_choice": "auto" if names else None}
    kind = choice.get("type")
    if kind not in (*_WORDS, "tool"):
        raise Untranslatable(f"vLLM does not know the tool choice {kind!r}")
    parallel = {"parallel_tool_calls": not optional(choice, "disable_parallel_tool_use", "true or false")}
    if kind == "tool":
        return parallel | {"tool_choice": {"type": "function", "function": {"name": _named(choice, names)}}}
    if kind == "any" and not names:
        raise Untranslatable("a tool must be called, and there is none")
    return parallel | {"tool_choice": _WORDS[kind] if names or kind == "none" else None}


def _named(choice: Json, names: list[str]) -> str:
    name = required(choice, "name", "text")
    if name not in names:
        raise Untranslatable(f"`tool_choice` names the tool {name!r}, which is not among `tools`")
    return str(name)
