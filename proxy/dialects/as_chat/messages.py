"""Translates /v1/messages, Anthropic's API, to chat and back, as vLLM 0.32's own route does.

Requests that the chat route refuses are sent to the Messages route, so fields that both check are not checked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from ....core.json_text import dumps
from ..messages import MessagesApi, MessagesStream
from .translation import Template, Translator, Untranslatable, picked

Json = dict[str, Any]

# Fields that chat has, too.
_SAME_IN_CHAT = (
    "model max_tokens temperature top_p top_k watermarking cache_salt kv_transfer_params ec_transfer_params vllm_xargs"
    " chat_template_kwargs"
)
_LEAST_BUDGET = 1024
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Claude Code's first system block. It changes with every request, so vLLM leaves it out.
_BILLING = "x-anthropic-billing-header"
_MAY_BE_LEFT_OUT = ("text", "image", "redacted_thinking", "tool_reference")


def _thinking(body: Json, template: Template) -> Json:
    thinking = body.get("thinking") or {"type": "adaptive"}
    match thinking["type"]:
        case "adaptive":
            return {}
        case "enabled" if _LEAST_BUDGET <= (budget := thinking["budget_tokens"]) < body["max_tokens"]:
            return {"thinking_token_budget": budget}
        case "enabled":
            raise Untranslatable("`thinking.budget_tokens` is below 1024, or not below `max_tokens`")
        case "disabled":
            return {"reasoning_effort": template.known("disabled_effort")}
        case kind:
            raise Untranslatable(f"vLLM does not support thinking of type {kind!r}")


def chat_messages(body: Json, template: Template) -> list[Json]:
    """Return the chat messages of a request. Raises Untranslatable if chat cannot express one."""
    first = body.get("system") or []
    system, out = [first] if isinstance(first, str) else _system_texts(first), list[Json]()
    for message in body["messages"]:
        if message["role"] != "system":
            out += _messages(message["role"], message["content"])
        elif text := "".join(_system_texts(message["content"])):
            if not (system or out) or template.known("merges_system"):
                system.append(text)
            else:
                out.append({"role": "system", "content": text})
    return [{"role": "system", "content": "".join(system)}, *out] if system else out


def _system_texts(content: str | list[Json]) -> list[str]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if kinds := {block["type"] for block in blocks} - {"text"}:
        raise Untranslatable(f"vLLM does not support system messages with blocks of type {min(kinds)!r}")
    texts = [block.get("text") or "" for block in blocks]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _messages(role: str, content: str | list[Json]) -> list[Json]:
    """The chat messages for a user or assistant message. Tool results come before the other blocks."""
    if role not in ("user", "assistant"):
        raise Untranslatable(f"a message has the unknown role {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Json] = []
    parts: list[Json] = []
    message: Json = {"role": role}
    for block in content:
        match block["type"]:
            case "text" if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
            case "image" if block.get("source"):
                parts.append(_image(block["source"]))
            case "thinking":
                message["reasoning"] = message.get("reasoning", "") + (block.get("thinking") or "")
            case "tool_use":
                # With the standard library's blanks: a template may show the text unchanged.
                function = {"name": block.get("name") or "", "arguments": json.dumps(dict(block.get("input") or {}))}
                call = {"id": block["id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "tool_result" if role == "user":
                results += _results(block)
            case kind if kind not in _MAY_BE_LEFT_OUT:
                raise Untranslatable(f"vLLM does not support {role} messages with blocks of type {kind!r}")
    if parts:
        only_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if only_text else parts
    return [*results, message] if parts or role == "assistant" else results


def _results(block: Json) -> list[Json]:
    """The chat messages for a tool's result: its text, then its images."""
    content = block.get("content") or ""
    items: list[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(item.get("type") == "tool_reference" for item in items):
        raise Untranslatable("a tool result has tool references")
    texts = [item["text"] for item in items if item.get("type") == "text" and "text" in item]
    images = [_image(item["source"]) for item in items if item.get("type") == "image"]
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": "\n".join(texts)}
    return [result, *([{"role": "user", "content": images}] if images else [])]


def _image(source: Json) -> Json:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat_tools(body: Json) -> list[Json]:
    """Return the chat tools of a request. Raises Untranslatable if one has no `input_schema`."""
    tools: list[Json] = []
    for tool in body.get("tools") or ():
        if "input_schema" not in tool:
            raise Untranslatable(f"vLLM does not support tools of type {tool.get('type')!r}")
        # In the order of vLLM: templates show it.
        schema = {**tool["input_schema"], "type": tool["input_schema"].get("type", "object")}
        function = {"name": tool["name"], "parameters": schema} | picked(tool, "description strict defer_loading")
        tools.append({"type": "function", "function": function})
    return tools


def _tools(body: Json, template: Template) -> Json:
    tools, choice = chat_tools(body), body.get("tool_choice")
    if body.get("tools") == [] and not template.known("ignores_no_tools"):
        raise Untranslatable("the list of tools is empty")
    # The chat route refuses an empty list, and treats a null choice differently from an absent one.
    chat: Json = {"tools": tools} if tools else {}
    if choice is None:
        return chat | {"tool_choice": "auto" if tools else None}
    if choice["type"] == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice["name"]}}
    elif choice["type"] in _CHOICES:
        chosen = _CHOICES[choice["type"]] if tools or choice["type"] != "auto" else None
    else:
        raise Untranslatable(f"vLLM does not support the tool choice {choice['type']!r}")
    return chat | {"tool_choice": chosen, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


# By the kind of a part of an answer: its block at the start, and where a delta has its text.
_PARTS: dict[str, tuple[Json, str, str]] = {
    "reasoning": ({"type": "thinking", "thinking": ""}, "thinking_delta", "thinking"),
    "content": ({"type": "text", "text": ""}, "text_delta", "text"),
    "call": ({"type": "tool_use"}, "input_json_delta", "partial_json"),
}


class MessagesTranslator(Translator):
    """Translates a call of the Messages API to chat, and the chat answer back."""

    own: ClassVar = MessagesApi()

    def __init__(self, body: Json) -> None:
        super().__init__(body)
        self._index = 0

    def chat(self, template: Template, earlier: Sequence[Json] = ()) -> Json:
        body = self.body
        chat = picked(body, _SAME_IN_CHAT)
        # Both, as vLLM does: which of them it names in a refusal depends on it.
        chat |= {"max_completion_tokens": body["max_tokens"], "messages": chat_messages(body, template)}
        if "stop_sequences" in body:
            chat["stop"] = body["stop_sequences"]
        if body.get("stream"):
            chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        config = body.get("output_config") or {}
        effort, form = config.get("effort"), config.get("format") or {}
        if effort not in (None, "low", "medium", "high", "xhigh", "max"):
            raise Untranslatable(f"vLLM does not support the reasoning effort {effort!r}")
        if effort is not None:
            chat["reasoning_effort"] = effort
        if form.get("type", "json_schema") != "json_schema":
            raise Untranslatable(f"vLLM does not support the output format {form['type']!r}")
        if schema := form.get("schema"):
            named = {"name": "json_schema", "schema": schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": named}
        return chat | _thinking(body, template) | _tools(body, template)

    @staticmethod
    def history(answer: Json) -> Json:
        return _messages("assistant", answer["content"])[-1]

    def refusal(self, body: Json) -> Json | None:
        return self.error(body["error"]) if isinstance(body.get("error"), dict) else None

    def begun(self) -> Iterator[Json]:
        message = {
            "id": self.told["id"], "type": "message", "role": "assistant", "content": [], "model": self.told["model"],
            "stop_reason": None, "stop_sequence": None, "usage": _usage(self.told),
        }  # fmt: skip
        yield {"type": "message_start", "message": message}

    def opened(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Json]:
        call = {"id": call_id, "name": name, "input": {}} if kind == "call" else {}
        yield {"type": "content_block_start", "content_block": _PARTS[kind][0] | call, "index": self._index}

    def added(self, text: str) -> Iterator[Json]:
        _, kind, name = _PARTS[self.kind]
        yield {"type": "content_block_delta", "delta": {"type": kind, name: text}, "index": self._index}

    def closed(self) -> Iterator[Json]:
        if self.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": uuid4().hex}
            yield {"type": "content_block_delta", "delta": delta, "index": self._index}
        yield {"type": "content_block_stop", "index": self._index}
        self._index += 1

    def ended(self) -> Iterator[Json]:
        reason, sequence = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(self.told)}
        yield {"type": "message_stop"}

    def error(self, error: Json) -> Json:
        kind, message = error.get("type") or "internal_error", str(error.get("message"))
        return {"type": "error", "error": {"type": kind, "message": message}}

    def whole(self, events: Sequence[Json]) -> Json:
        """The whole answer. As Anthropic suggests, a tool input that is not a JSON object is wrapped in one."""
        stream = MessagesStream()
        for event in events:
            stream.take(b"", event)
        answer = stream.response()
        answer["content"] = answer["content"] or [{"type": "text", "text": ""}]
        for block in answer["content"]:
            if not isinstance(given := block.get("input", {}), dict):
                block["input"] = {"INVALID_JSON": given if isinstance(given, str) else dumps(given)}
        answer |= picked(self.told, "kv_transfer_params ec_transfer_params")
        return {name: value for name, value in answer.items() if value is not None}

    def _stop_reason(self) -> tuple[str | None, str | None]:
        """The `stop_reason` and `stop_sequence`. The reason is not `tool_use` if a sequence cut off the last call."""
        finish, stop = self.choice["finish_reason"], self.choice.get("stop_reason")
        if finish == "length":
            return "max_tokens", None
        if finish not in ("stop", "tool_calls"):
            return None, None
        calls = self.calls.opened
        if calls and calls[-1].is_complete:  # only the last can have been cut
            return "tool_use", None
        if isinstance(stop, str):
            return "stop_sequence", stop
        return ("tool_use" if calls or finish == "tool_calls" else "end_turn"), None


def _usage(chat: Json) -> Json:
    """The usage, with cached tokens counted separately if vLLM reports them."""
    usage = chat.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    cache = {"cache_creation_input_tokens": "created_cache_tokens", "cache_read_input_tokens": "cached_tokens"}
    cached = {name: details[theirs] for name, theirs in cache.items() if details.get(theirs) is not None}
    own = max(0, usage.get("prompt_tokens", 0) - sum(cached.values()))
    return {"input_tokens": own, "output_tokens": usage.get("completion_tokens") or 0} | cached
