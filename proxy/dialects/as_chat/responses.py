"""Translates requests for /v1/responses to vLLM's chat route, and the answers back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ....core.tools import dicts
from ....core.values import as_read
from .responses_answer import LOGPROBS, ResponsesReply, ResponsesStreamTranslation
from .responses_items import Tools, messages_of
from .translation import StreamTranslation, Untranslatable

Json = dict[str, Any]

# Fields that the chat route has by the same name. All others do not reach the model.
_PASSED = (
    "model", "stream", "user", "request_id", "session_id", "priority", "cache_salt", "parallel_tool_calls",
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logit_bias",
    "watermarking", "structured_outputs", "vllm_xargs", "kv_transfer_params", "ec_transfer_params",
    "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip
_UNSUPPORTED = ("background", "prompt", "enable_response_messages", "previous_input_messages")
_INCLUDED = frozenset(
    {
        LOGPROBS, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
        "message.input_image.image_url", "reasoning.encrypted_content",
    }
)  # fmt: skip
_UNFINISHED = frozenset({"in_progress", "incomplete"})


class ResponsesTranslator:
    """Agrees with vLLM's own route, but for the parts of a history that it would drop."""

    def request(self, body: Json, earlier: Sequence[Json] = ()) -> ResponsesTranslation:
        return ResponsesTranslation(as_read(body), earlier)

    def history_message(self, answer: Json) -> Json:
        messages = messages_of(dicts(answer.get("output")))
        return messages[-1] if messages else {"role": "assistant", "content": ""}


class ResponsesTranslation:
    """One request for /v1/responses as a chat request."""

    def __init__(self, body: Json, earlier: Sequence[Json]) -> None:
        """Raise Untranslatable for what the chat route cannot do, or vLLM's own route refuses."""
        given = {name: value for name, value in body.items() if value is not None}
        _check(given, earlier)
        tools = Tools(given.get("tools", []))
        self._body = body
        self._tools = tools
        self.chat: Json = {name: given[name] for name in _PASSED if name in given}
        self.chat |= _conversation(given, earlier) | _tools(given, tools) | _limits(given) | _shape(given)

    def answer(self, chat: Json) -> Json:
        return ResponsesReply(self._body, self._tools).answer(chat)

    def stream(self) -> StreamTranslation:
        return ResponsesStreamTranslation(ResponsesReply(self._body, self._tools))

    def refused(self, error: Json) -> Json:
        """Return the chat route's error with the agent's own name of the field."""
        inner = dict(error["error"])
        for name in ("message", "param"):
            if isinstance(text := inner.get(name), str):
                inner[name] = text.replace("max_completion_tokens", "max_output_tokens")
        return error | {"error": inner}


def _check(given: Json, earlier: Sequence[Json]) -> None:
    if name := next((name for name in _UNSUPPORTED if given.get(name)), None):
        raise Untranslatable(f"{name} is only known to the Responses route")
    if given.get("previous_response_id") and not earlier:
        raise Untranslatable("previous_response_id without the earlier conversation")
    if not _INCLUDED.issuperset(given.get("include", ())):
        raise Untranslatable("an unknown value of include")


def messages_shown(given: Json, earlier: Sequence[Json]) -> list[Json]:
    """Return the chat messages that a request shows the model, after the `earlier` items; raise Untranslatable."""
    messages = messages_of(_resolved([*earlier, *_items(given)]))
    if instructions := given.get("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise Untranslatable("an empty input")
    return messages


def _items(given: Json) -> Sequence[Json]:
    items = given["input"]
    return [{"role": "user", "content": items}] if isinstance(items, str) else items


def _conversation(given: Json, earlier: Sequence[Json]) -> Json:
    chat: Json = {"messages": messages_shown(given, earlier)}
    if _is_unfinished(_items(given)[-1:]):  # the model continues its last message
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat


def _resolved(items: Sequence[Json]) -> Iterator[Json]:
    """The items, with those before them that they only refer to put in."""
    known: dict[Any, Json] = {}
    for item in items:
        if item.get("type") != "item_reference":
            known[item.get("id")] = item
            yield item
        elif item["id"] in known:
            yield known[item["id"]]
        else:
            raise Untranslatable("a reference to an unknown item")


def _is_unfinished(last: Sequence[Json]) -> bool:
    return any(i.get("type", "message") in ("message", "reasoning") and i.get("status") in _UNFINISHED for i in last)


def _tools(given: Json, tools: Tools) -> Json:
    choice = given.get("tool_choice", "auto")
    if not tools.chat:
        if choice in ("auto", "none"):
            return {}
        raise Untranslatable("tool_choice without tools")
    chosen = tools.choice(choice)
    if isinstance(chosen, dict) and "structured_outputs" in given:
        raise Untranslatable("structured_outputs beside a named tool")
    return {"tools": tools.chat, "tool_choice": chosen}


def _limits(given: Json) -> Json:
    limits: Json = {}
    if "max_output_tokens" in given:
        limits["max_completion_tokens"] = given["max_output_tokens"]
    if given.get("truncation") == "auto":
        limits["truncate_prompt_tokens"] = -1
    if LOGPROBS in given.get("include", ()):
        limits |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    return limits


def _shape(given: Json) -> Json:
    """The reasoning effort, and the format of the answer."""
    shape: Json = {}
    if effort := given.get("reasoning", {}).get("effort"):
        shape["reasoning_effort"] = effort
    form = given.get("text", {}).get("format")
    if form and "structured_outputs" in given:
        raise Untranslatable("both text.format and structured_outputs")
    if form and form["type"] == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        shape["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form and form["type"] == "json_object":
        shape["response_format"] = {"type": "json_object"}
    return shape
