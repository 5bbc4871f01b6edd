"""Builds the response object and its output items from a chat answer, with every field that vLLM's own route sends."""

from __future__ import annotations

import json
import secrets
from typing import Any

from .responses_items import CUSTOM_INPUT
from .responses_tools import Tools

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_REASONING = ("context", "effort", "generate_summary", "mode", "summary")
_SCHEMA = ("name", "schema", "type", "description", "strict")
# vLLM samples with no lower temperature, but for 0.
_LEAST_TEMPERATURE = 1e-2


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
