"""Translates /v1/responses to chat and back, as vLLM 0.32's own route does, but keeps more of the history.

The items of one model turn become one message. In a stream, one item at a time is open.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

from ....core.json_text import dumps, encode, loads
from ....core.tools import dicts
from ..responses import ResponsesApi
from .translation import Template, Translator, Untranslatable, picked

Json = dict[str, Any]

# Fields that chat has, too. Those that are not here do not reach the model.
_SAME_IN_CHAT = """
    model stream user request_id session_id priority cache_salt parallel_tool_calls temperature top_p top_k min_p
    repetition_penalty presence_penalty frequency_penalty seed stop stop_token_ids ignore_eos include_stop_str_in_output
    skip_special_tokens logit_bias watermarking structured_outputs vllm_xargs kv_transfer_params ec_transfer_params
    chat_template_kwargs media_io_kwargs mm_processor_kwargs
"""
_UNSUPPORTED = ("background", "prompt", "enable_response_messages", "previous_input_messages")
_UNFINISHED = ("in_progress", "incomplete")
_ROLES = ("user", "assistant", "system", "developer")

# vLLM shows the model a custom tool as a function with this one argument.
_CUSTOM_INPUT = "input"
_CUSTOM_PARAMETERS: Json = {
    "type": "object",
    "properties": {_CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}
_WEB = "search_context_size user_location"
# The tools that vLLM takes, with the fields that its answer has also where the request left them out.
_TOOLS = {
    "function": "parameters strict allowed_callers defer_loading description output_schema",
    "custom": "allowed_callers defer_loading description format",
    "namespace": "",
    "web_search": f"filters {_WEB}",
    "web_search_2025_08_26": f"filters {_WEB}",
    "web_search_preview": f"search_content_types {_WEB}",
    "web_search_preview_2025_03_11": f"search_content_types {_WEB}",
    "file_search": "filters max_num_results ranking_options",
    "code_interpreter": "allowed_callers",
    "local_shell": "",
    "shell": "allowed_callers environment",
    "apply_patch": "allowed_callers",
    "tool_search": "description execution parameters",
    "mcp": "allowed_callers allowed_tools authorization connector_id defer_loading headers require_approval"
    " server_description server_url tunnel_id",
}


def _items(given: Json) -> Sequence[Json]:
    items = given["input"]
    return [{"role": "user", "content": items}] if isinstance(items, str) else items


def messages_shown(given: Json, earlier: Sequence[Json]) -> list[Json]:
    """Return the chat messages for `earlier` items and a request. Raises Untranslatable if that is impossible."""
    items = [*earlier, *_items(given)]
    known = {item.get("id"): item for item in items if item.get("type") != "item_reference"}
    try:
        items = [known[item["id"]] if item.get("type") == "item_reference" else item for item in items]
    except KeyError:
        raise Untranslatable("an item_reference names an unknown item") from None
    messages = messages_of(items)
    if instructions := given.get("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise Untranslatable("the input is empty")
    return messages


def messages_of(items: Iterable[Json]) -> list[Json]:
    """Return the chat messages for these items, in order. Raises Untranslatable if chat cannot express one.

    As in vLLM, an item of the model's turn joins the message before it if that message lacks such an item. Further tool
    calls join it too, and so does text after a call, because a chat message has only one text.
    """
    messages: list[Json] = []
    for item in items:
        message = _message(item)
        before, name = messages[-1] if messages else {}, [*message][1]  # the model's have one field besides the role
        is_same_turn = before.get("role") == message["role"] == "assistant"
        if is_same_turn and name not in before:
            before[name] = message[name]
        elif is_same_turn and (name == "tool_calls" or (name == "content" and "tool_calls" in before)):
            before[name] += message[name]
        else:
            messages.append(message)
    return messages


def _message(item: Json) -> Json:
    match item.get("type") or "message":
        case "message":
            role, content = item.get("role"), item["content"]
            if role not in _ROLES:
                raise Untranslatable(f"a message has the unknown role {role!r}")
            if not isinstance(content, str):
                parts = [_part(part) for part in content]
                # vLLM would keep only the first text of the model's.
                content = "".join(part["text"] for part in parts) if role == "assistant" else parts
            return {"role": role, "content": content}
        case "reasoning":
            text = "".join(part["text"] for part in item.get("content") or ())
            text = text or "\n\n".join(part["text"] for part in item.get("summary") or ())
            if not text and item.get("encrypted_content"):
                raise Untranslatable("a reasoning item is encrypted")
            return {"role": "assistant", "reasoning": text}
        case "function_call" | "custom_tool_call" as kind:
            is_custom = kind == "custom_tool_call"
            arguments = dumps({_CUSTOM_INPUT: item.get("input") or ""}) if is_custom else item["arguments"]
            function = {"name": _flat_name(item.get("namespace"), item["name"]), "arguments": arguments}
            call = {"id": item["call_id"], "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output" | "custom_tool_call_output":
            output = item["output"]
            content = output if isinstance(output, str) else [_part(part) for part in output]
            return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
        case kind:
            raise Untranslatable(f"an item of type {kind} cannot be written as chat")


def _part(part: Json) -> Json:
    match part["type"]:
        case "input_text" | "output_text":
            return {"type": "text", "text": part["text"]}
        case "refusal":
            return {"type": "text", "text": part["refusal"]}
        case "input_image" if part.get("image_url"):
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case "input_image":
            raise Untranslatable("vLLM does not support an input_image without image_url")
        case kind:
            raise Untranslatable(f"vLLM does not support content of type {kind!r}")


def _flat_name(namespace: Any, name: str) -> str:
    """The name under which vLLM shows the model a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def _functions(tools: Iterable[Json]) -> dict[str, Json]:
    """The agent's functions and custom tools by the name that the model sees, each with its `namespace`.

    As in vLLM, tools that a server runs are not shown. Raises Untranslatable for grammars and tools that vLLM refuses.
    """
    functions: dict[str, Json] = {}
    for tool in tools:
        if (kind := tool["type"]) not in _TOOLS:
            raise Untranslatable(f"vLLM does not support tools of type {kind!r}")
        if kind == "custom" and (tool.get("format") or {}).get("type") == "grammar":
            raise Untranslatable("a custom tool has a grammar")
        if kind in ("function", "custom"):
            functions[tool["name"]] = tool | {"namespace": None}
        for inner in tool["tools"] if kind == "namespace" else ():
            if inner["type"] == "function":
                functions[_flat_name(tool["name"], inner["name"])] = inner | {"namespace": tool["name"]}
    return functions


def tools_of(tools: Iterable[Json]) -> list[Json]:
    """Return a request's tools in chat's form. Raises Untranslatable for grammars and tools that vLLM refuses."""
    shown: list[Json] = []
    for name, tool in _functions(tools).items():
        is_custom = tool["type"] == "custom"
        fields = {"description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS} if is_custom else tool
        function = {"name": name} | picked(fields, "description parameters strict defer_loading")
        shown.append({"type": "function", "function": function})
    return shown


def _tools(given: Json) -> Json:
    tools, choice = tools_of(given.get("tools", [])), given.get("tool_choice", "auto")
    if not tools:
        if choice in ("auto", "none"):
            return {}
        raise Untranslatable("tool_choice is given, but the model sees no tool")
    if isinstance(choice, dict):
        if "structured_outputs" in given:
            raise Untranslatable("both structured_outputs and a tool_choice that names a tool are given")
        if choice["type"] not in ("function", "custom"):
            raise Untranslatable(f"vLLM does not support a tool_choice of type {choice['type']!r}")
        if all(tool["function"]["name"] != choice["name"] for tool in tools):
            raise Untranslatable(f"tool_choice names {choice['name']!r}, which is not one of the tools")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return {"tools": tools, "tool_choice": choice}


# The fields of a response in vLLM's order, and what they are where neither the request nor the answer has them.
_ORDER = """
    id created_at incomplete_details instructions metadata model object output parallel_tool_calls temperature
    tool_choice tools top_p background max_output_tokens max_tool_calls previous_response_id prompt reasoning
    service_tier status text top_logprobs truncation usage user presence_penalty frequency_penalty kv_transfer_params
    ec_transfer_params input_messages output_messages
"""
_RESPONSE: Json = dict.fromkeys(_ORDER.split()) | {
    "object": "response", "output": [], "parallel_tool_calls": True, "temperature": 1, "tool_choice": "auto",
    "tools": [], "top_p": 1, "background": False, "service_tier": "auto", "status": "in_progress",
    "truncation": "disabled", "presence_penalty": 0, "frequency_penalty": 0,
}  # fmt: skip
# The items of a response as they begin, by the kind of the part; `id` is the prefix of an item's id.
_ITEMS: dict[str, Json] = {
    "reasoning": {
        "id": "rs", "summary": [], "type": "reasoning", "content": None, "encrypted_content": None,
        "status": "in_progress",
    },
    "content": {
        "id": "msg", "content": [], "role": "assistant", "status": "in_progress", "type": "message", "phase": None,
    },
    "function": {"arguments": "", "type": "function_call", "id": "fc", "caller": None, "status": "in_progress"},
    "custom": {"input": "", "type": "custom_tool_call", "id": "ctc", "caller": None},
}  # fmt: skip
_LEAST_TEMPERATURE = 1e-2  # vLLM uses no lower temperature, except 0
_REASONING = ("context", "effort", "generate_summary", "mode", "summary")
_SCHEMA = ("name", "schema", "type", "description", "strict")


class ResponsesTranslator(Translator):
    """Translates a call of the Responses API to chat, and the chat answer back."""

    own: ClassVar = ResponsesApi()
    opened_by_nothing: ClassVar[tuple[str, ...]] = ("reasoning",)

    def __init__(self, body: Json) -> None:
        super().__init__(body)
        if self.body.get("include_reasoning") is False:
            self.kinds = ("content",)
        self._response: Json = {}
        self._functions: dict[str, Json] = {}
        self._numbers = count()
        self._output: list[Json] = []
        self._item: Json = {}  # the open one, as it began, and its text
        self._said = ""

    def chat(self, template: Template, earlier: Sequence[Json] = ()) -> Json:
        given = self.body
        if name := next((name for name in _UNSUPPORTED if given.get(name)), None):
            raise Untranslatable(f"only the Responses route supports {name}")
        if given.get("previous_response_id") and not earlier:
            raise Untranslatable("the conversation of previous_response_id is not known")
        if more := {*given.get("include", ())} - {"reasoning.encrypted_content"}:
            raise Untranslatable(f"only the Responses route can include {min(more)}")
        chat = picked(given, _SAME_IN_CHAT)
        chat |= {"messages": messages_shown(given, earlier)} | _tools(given)
        if "max_output_tokens" in given:
            chat["max_completion_tokens"] = given["max_output_tokens"]
        if effort := given.get("reasoning", {}).get("effort"):
            chat["reasoning_effort"] = effort
        form = given.get("text", {}).get("format")
        if form and "structured_outputs" in given:
            raise Untranslatable("both text.format and structured_outputs are given")
        if form and form["type"] != "text":
            schema = {name: value for name, value in form.items() if name != "type" and value is not None}
            chat["response_format"] = {"type": form["type"]} | ({"json_schema": schema} if schema else {})
        for last in _items(given)[-1:]:
            if last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED:
                chat |= {"add_generation_prompt": False, "continue_final_message": True}  # the model continues that
        if given.get("truncation") == "auto":
            chat["truncate_prompt_tokens"] = -1
        return chat

    @staticmethod
    def history(answer: Json) -> Json:
        return (messages_of(dicts(answer.get("output"))) or [{"role": "assistant", "content": ""}])[-1]

    def refusal(self, body: Json) -> Json | None:
        """The refusal, with the Responses API's name for the token limit."""
        text = encode(body).replace(b"max_completion_tokens", b"max_output_tokens")
        return loads(text) if isinstance(body.get("error"), dict) else None

    def begun(self) -> Iterator[Json]:
        answer_id = self.body.get("request_id") or _new_id("resp")
        told = {"id": answer_id, "created_at": self.told["created"], "model": self.told["model"]}
        self._response = _repeated(self.body) | told
        self._functions = _functions(self._response["tools"])
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response)

    def opened(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Json]:
        is_call, called = kind == "call", Json()
        if is_call:
            tool = self._functions.get(name, {"type": "function", "name": name, "namespace": None})
            kind = tool["type"]
            called = {"call_id": call_id, "name": tool["name"], "namespace": tool["namespace"]}
        item = _ITEMS[kind] | called
        self._item, self._said = item | {"id": _new_id(item["id"])}, ""
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        if not is_call:
            yield self._of_item("content_part.added", content_index=0, part=self._part([]))

    def added(self, text: str) -> Iterator[Json]:
        self._said += text
        match self._item["type"]:
            case "reasoning":
                yield self._of_item("reasoning_text.delta", content_index=0, delta=text)
            case "message":
                yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=[])
            case "function_call":
                yield self._of_item("function_call_arguments.delta", delta=text)

    def closed(self) -> Iterator[Json]:
        done: Json = {"status": "completed"}
        match self._item["type"]:
            case "function_call":
                done["arguments"] = self._said
                yield self._of_item("function_call_arguments.done", arguments=self._said, name=self._item["name"])
            case "custom_tool_call":
                done = {"input": (text := _custom_input(self._said))}
                if text:  # in one piece: it is the text of a JSON object's one member
                    yield self._of_item("custom_tool_call_input.delta", delta=text)
                yield self._of_item("custom_tool_call_input.done", input=text)
            case kind:
                part = self._part(None)
                more: Json = {"logprobs": []} if kind == "message" else {}
                yield self._of_item(f"{part['type']}.done", content_index=0, text=self._said, **more)
                yield self._of_item("content_part.done", content_index=0, part=part)
                done["content"] = [part]
        item = self._item | done
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def ended(self) -> Iterator[Json]:
        usage = _usage(self.told.get("usage"))
        response = self._response | picked(self.told, "kv_transfer_params ec_transfer_params metrics")
        response |= {"output": self._output, "status": "completed", "usage": usage}
        if self.choice["finish_reason"] == "length":
            response |= _cut(usage)
        yield self._event("response.completed", response=response)

    def error(self, error: Json) -> Json:
        code, message = error.get("code"), str(error.get("message"))
        return self._event("error", code=None if code is None else str(code), message=message, param=None)

    def whole(self, events: Sequence[Json]) -> Json:
        response: Json = events[-1]["response"]
        limit, usage = self.body.get("max_output_tokens"), response["usage"]
        # Of a whole answer with calls, chat says only `tool_calls`, also where the limit cut it.
        if limit and self.choice["finish_reason"] == "tool_calls" and usage["output_tokens"] >= limit:
            response |= _cut(usage)
        for item in response["output"]:
            if item["type"] == "reasoning":
                item["status"] = None
        return response

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, **fields, "sequence_number": next(self._numbers)}

    def _of_item(self, kind: str, **fields: Any) -> Json:
        return self._event(f"response.{kind}", item_id=self._item["id"], output_index=len(self._output), **fields)

    def _part(self, logprobs: list[Json] | None) -> Json:
        if self._item["type"] == "reasoning":
            return {"text": self._said, "type": "reasoning_text"}
        return {"annotations": [], "text": self._said, "type": "output_text", "logprobs": logprobs}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(8)}"


def _cut(usage: Json | None) -> Json:
    """The fields of a response that reached its token limit."""
    limit = {"max_output_tokens": usage["output_tokens"]} if usage else {}
    return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, **limit}


def _custom_input(arguments: str) -> str:
    """A custom tool's input: the only argument of its call, or else the entire text."""
    try:
        value = json.loads(arguments)[_CUSTOM_INPUT]
    except (ValueError, TypeError, LookupError):
        return arguments
    return value if isinstance(value, str) else arguments


def _usage(usage: Json | None) -> Json | None:
    """The usage in the form of Responses. Details that the server did not send are 0 or empty."""
    if usage is None:
        return None
    cache, spent = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    read, written = cache.get("cached_tokens") or 0, cache.get("created_cache_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": read, "cache_write_tokens": written,
            "input_tokens_per_turn": [], "cached_tokens_per_turn": [],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": spent.get("reasoning_tokens") or 0, "tool_output_tokens": 0,
            "output_tokens_per_turn": [], "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage["total_tokens"],
    }  # fmt: skip


def _repeated(given: Json) -> Json:
    """A response with the fields that it repeats from its request."""
    response = _RESPONSE | {name: value for name, value in given.items() if name in _RESPONSE}
    response |= {"kv_transfer_params": None, "ec_transfer_params": None, "top_logprobs": None}
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        response[name] = float(response[name])
    if response["temperature"] == 0:
        response["top_p"] = 1.0
    else:
        response["temperature"] = max(response["temperature"], _LEAST_TEMPERATURE)
    if not response["tools"] and response["tool_choice"] == "auto":
        response["tool_choice"] = "none"
    response["tools"] = [*map(_filled, response["tools"])]
    if reasoning := given.get("reasoning"):
        response["reasoning"] = dict.fromkeys(_REASONING) | reasoning
    if (text := given.get("text")) is not None:
        form = text.get("format")
        if form and form["type"] == "json_schema":
            form = dict.fromkeys(_SCHEMA) | form
        response["text"] = {"format": form, "verbosity": text.get("verbosity")}
    return response


def _filled(tool: Json) -> Json:
    """A tool in the form in which the response repeats it."""
    filled: Json = dict.fromkeys(_TOOLS[tool["type"]].split()) | tool
    return filled | {"tools": [*map(_filled, tool["tools"])]} if tool["type"] == "namespace" else filled
