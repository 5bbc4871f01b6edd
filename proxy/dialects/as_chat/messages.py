"""Translates requests of /v1/messages, Anthropic's API, into chat requests, as vLLM 0.32's own route does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....core.values import as_read
from .messages_answer import message_of
from .messages_history import chat_message, chat_messages
from .messages_stream import MessagesEvents, error_of
from .messages_tools import chat_tools
from .reading import optional, required
from .template import EFFORTS, Template, TemplateUnknown
from .translation import Untranslatable

Json = dict[str, Any]

_NUMBERS = {"temperature": "a number", "top_p": "a number", "top_k": "an integer"}
# vLLM's own fields, of which both routes make the same.
_ALIKE = {
    "watermarking": "true or false", "cache_salt": "text", "kv_transfer_params": "an object",
    "ec_transfer_params": "an object", "vllm_xargs": "an object", "chat_template_kwargs": "an object",
}  # fmt: skip
_LEAST_BUDGET = 1024


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
