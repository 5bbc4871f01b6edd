"""Translates /v1/responses to chat and back, as vLLM 0.32's own route does, but for parts of a history it would drop.

Items that one turn of the model consists of become one message. In a stream, one item at a time is open.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, NamedTuple

from ....core.json_text import dumps, encode, loads
from ....core.tools import dicts
from .translation import Template, Translator, Untranslatable

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
# By their names, those of chat. Fields that are not here do not reach the model.
_FIELDS = {"max_output_tokens": "max_completion_tokens"} | {
    name: name
    for name in (
        "model", "stream", "user", "request_id", "session_id", "priority", "cache_salt", "parallel_tool_calls",
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logit_bias",
        "watermarking", "structured_outputs", "vllm_xargs", "kv_transfer_params", "ec_transfer_params",
        "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
    )
}  # fmt: skip
_UNSUPPORTED = ("background", "prompt", "enable_response_messages", "previous_input_messages")
_INCLUDED = {
    LOGPROBS, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content",
}  # fmt: skip
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
_SHOWN = ("description", "parameters", "strict", "defer_loading")
_WEB = ("search_context_size", "user_location")
# The tools that vLLM takes, with the fields that its answer has also where the request left them out.
_TOOLS: dict[str, tuple[str, ...]] = {
    "function": ("parameters", "strict", "allowed_callers", "defer_loading", "description", "output_schema"),
    "custom": ("allowed_callers", "defer_loading", "description", "format"),
    "namespace": (),
    "web_search": ("filters", *_WEB),
    "web_search_2025_08_26": ("filters", *_WEB),
    "web_search_preview": ("search_content_types", *_WEB),
    "web_search_preview_2025_03_11": ("search_content_types", *_WEB),
    "file_search": ("filters", "max_num_results", "ranking_options"),
    "code_interpreter": ("allowed_callers",),
    "local_shell": (),
    "shell": ("allowed_callers", "environment"),
    "apply_patch": ("allowed_callers",),
    "tool_search": ("description", "execution", "parameters"),
    "mcp": (
        "allowed_callers", "allowed_tools", "authorization", "connector_id", "defer_loading", "headers",
        "require_approval", "server_description", "server_url", "tunnel_id",
    ),
}  # fmt: skip


def _given(body: Json) -> Json:
    return {name: value for name, value in body.items() if value is not None}


def _items(given: Json) -> Sequence[Json]:
    items = given["input"]
    return [{"role": "user", "content": items}] if isinstance(items, str) else items


def messages_shown(given: Json, earlier: Sequence[Json]) -> list[Json]:
    """Return the chat messages that a request shows the model, after the `earlier` items; raise Untranslatable."""
    known: dict[Any, Json] = {}
    items = []
    for item in (*earlier, *_items(given)):
        refers = item.get("type") == "item_reference"
        if refers and item["id"] not in known:
            raise Untranslatable("a reference to an unknown item")
        items.append(known[item["id"]] if refers else item)
        known[item.get("id")] = items[-1]
    messages = messages_of(items)
    if instructions := given.get("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise Untranslatable("an empty input")
    return messages


def _shape(given: Json) -> Json:
    """The reasoning effort, and the format of the answer."""
    shape: Json = {}
    if effort := given.get("reasoning", {}).get("effort"):
        shape["reasoning_effort"] = effort
    form = given.get("text", {}).get("format")
    if form and "structured_outputs" in given:
        raise Untranslatable("both text.format and structured_outputs")
    if form and form["type"] != "text":
        schema = {name: value for name, value in _given(form).items() if name != "type"}
        shape["response_format"] = {"type": form["type"]} | ({"json_schema": schema} if schema else {})
    return shape


def messages_of(items: Iterable[Json]) -> list[Json]:
    """Return the messages that items become, oldest first; raise Untranslatable."""
    messages: list[Json] = []
    for item in items:
        message = _message(item)
        if not messages or not _joins(messages[-1], message):
            messages.append(message)
    return messages


def _joins(before: Json, message: Json) -> bool:
    """Add a part of the model's turn to the one before, as vLLM does; return whether it belongs there."""
    if not before["role"] == message["role"] == "assistant":
        return False
    _, name = message  # beside its role
    if name == "tool_calls":
        before.setdefault(name, []).extend(message[name])
    elif name not in before:
        before[name] = message[name]
    elif name == "content" and "tool_calls" in before:  # text after a call, which chat has in one piece
        before[name] += message[name]
    else:
        return False
    return True


def _message(item: Json) -> Json:
    """An item as a message; one of the model's has one field beside its role."""
    match item.get("type") or "message":
        case "message":
            role, content = item.get("role"), item["content"]
            if role not in _ROLES:
                raise Untranslatable(f"a message of role {role}")
            if not isinstance(content, str):
                parts = [_part(part) for part in content]
                # vLLM would keep only the first text of the model's.
                content = "".join(part["text"] for part in parts) if role == "assistant" else parts
            return {"role": role, "content": content}
        case "reasoning":
            text = "".join(part["text"] for part in item.get("content") or ())
            text = text or "\n\n".join(part["text"] for part in item.get("summary") or ())
            if not text and item.get("encrypted_content"):
                raise Untranslatable("encrypted reasoning")
            return {"role": "assistant", "reasoning": text}
        case "function_call":
            return _call(item, _flat_name(item.get("namespace"), item["name"]), item["arguments"])
        case "custom_tool_call":
            return _call(item, item["name"], dumps({_CUSTOM_INPUT: item.get("input") or ""}))
        case "function_call_output" | "custom_tool_call_output":
            output = item["output"]
            content = output if isinstance(output, str) else [_part(part) for part in output]
            return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
        case kind:
            raise Untranslatable(f"an item of type {kind} cannot be written as chat")


def _call(item: Json, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


def _flat_name(namespace: Any, name: str) -> str:
    """The name by which vLLM shows the model a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


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
        case kind:
            raise Untranslatable(f"content of type {kind}")


class _Function(NamedTuple):
    """A function with the name that the model is shown. `namespace` and `own` name are the agent's."""

    name: str
    fields: Json
    own: str
    namespace: str | None = None
    is_custom: bool = False


def _functions(tools: Iterable[Json]) -> Iterator[_Function]:
    """The functions that the model is shown: as vLLM, without the tools that a server runs itself."""
    for tool in tools:
        if tool["type"] == "function":
            yield _Function(tool["name"], tool, tool["name"])
        elif tool["type"] == "custom":
            fields = {"description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}
            yield _Function(tool["name"], fields, tool["name"], is_custom=True)
        elif tool["type"] == "namespace":
            for inner in tool["tools"]:
                if inner["type"] == "function":
                    yield _Function(_flat_name(tool["name"], inner["name"]), inner, inner["name"], tool["name"])


def tools_of(tools: Sequence[Json]) -> list[Json]:
    """Return the chat tools for these; raise Untranslatable for tools that vLLM refuses."""
    for tool in tools:
        if tool["type"] not in _TOOLS:
            raise Untranslatable(f"a tool of type {tool['type']}")
        if tool["type"] == "custom" and (tool.get("format") or {}).get("type") == "grammar":
            raise Untranslatable("a custom tool with a grammar")
    shown: list[Json] = []
    for one in _functions(tools):
        fields = {name: one.fields[name] for name in _SHOWN if one.fields.get(name) is not None}
        shown.append({"type": "function", "function": {"name": one.name} | fields})
    return shown


def _tools(given: Json) -> Json:
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if not (chat := tools_of(tools)):
        if choice in ("auto", "none"):
            return {}
        raise Untranslatable("tool_choice without tools")
    if isinstance(choice, dict):
        allowed = {tool.get("name") for tool in choice.get("tools", ())}
        if choice["type"] in ("function", "custom"):
            if "structured_outputs" in given:
                raise Untranslatable("structured_outputs beside a named tool")
            choice = {"type": "function", "function": {"name": _named(choice, tools)["name"]}}
        elif choice["type"] == "allowed_tools" and allowed.issuperset(tool["function"]["name"] for tool in chat):
            choice = choice["mode"]
        else:
            raise Untranslatable(f"tool_choice {choice['type']}")
    return {"tools": chat, "tool_choice": choice}


def _named(choice: Any, tools: Sequence[Json]) -> Any:
    """`tool_choice` as the response repeats it, with the name that the model is shown."""
    if not isinstance(choice, dict) or choice["type"] not in ("function", "custom"):
        return choice
    name = choice["name"]
    names = [one.name for one in _functions(tools) if name in (one.name, one.own)]
    if name not in names and len(names) != 1:
        raise Untranslatable(f"tool_choice names {name}, which is no tool or several")
    return choice | {"name": name if name in names else names[0]}


# The fields of a response in vLLM's order, as they are where neither the request nor the answer has them.
_RESPONSE: Json = {
    "id": None, "created_at": None, "incomplete_details": None, "instructions": None, "metadata": None, "model": None,
    "object": "response", "output": [], "parallel_tool_calls": True, "temperature": 1, "tool_choice": "auto",
    "tools": [], "top_p": 1, "background": False, "max_output_tokens": None, "max_tool_calls": None,
    "previous_response_id": None, "prompt": None, "reasoning": None, "service_tier": "auto", "status": "in_progress",
    "text": None, "top_logprobs": 0, "truncation": "disabled", "usage": None, "user": None, "presence_penalty": 0,
    "frequency_penalty": 0, "kv_transfer_params": None, "ec_transfer_params": None, "input_messages": None,
    "output_messages": None,
}  # fmt: skip
# The items of a response as they begin, by the kind of the part; their id says its prefix.
_ITEMS: dict[str, Json] = {
    "reasoning": {
        "id": "rs", "summary": [], "type": "reasoning", "content": None, "encrypted_content": None,
        "status": "in_progress",
    },
    "content": {
        "id": "msg", "content": [], "role": "assistant", "status": "in_progress", "type": "message", "phase": None,
    },
    "call": {
        "arguments": "", "call_id": "", "name": "", "type": "function_call", "id": "fc", "caller": None,
        "namespace": None, "status": "in_progress",
    },
    "custom": {
        "call_id": "", "input": "", "name": "", "type": "custom_tool_call", "id": "ctc", "caller": None,
        "namespace": None,
    },
}  # fmt: skip
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_LEAST_TEMPERATURE = 1e-2  # vLLM samples with no lower one, but for 0
_REASONING = ("context", "effort", "generate_summary", "mode", "summary")
_SCHEMA = ("name", "schema", "type", "description", "strict")


class ResponsesTranslator(Translator):
    """Its events: the response as it begins, its items one after the other, and all of it. Each has a number."""

    opened_by_nothing: ClassVar[tuple[str, ...]] = ("reasoning",)

    def __init__(self, body: Json) -> None:
        super().__init__(body)
        if self.body.get("include_reasoning") is False:
            self.kinds = ("content",)
        # With hidden reasoning vLLM hides the tokens too: they would show it.
        self._shows_logprobs = LOGPROBS in self.body.get("include", ()) and "reasoning" in self.kinds
        self._response: Json = {}
        self._numbers = count()
        self._output: list[Json] = []
        # Of the open item:
        self._item: Json = {}
        self._said = ""
        self._tokens: list[Json] = []
        self._function = _Function("", {}, "")

    def chat(self, template: Template, earlier: Sequence[Json] = ()) -> Json:
        given = self.body
        if name := next((name for name in _UNSUPPORTED if given.get(name)), None):
            raise Untranslatable(f"{name} is only known to the Responses route")
        if given.get("previous_response_id") and not earlier:
            raise Untranslatable("previous_response_id without the earlier conversation")
        if not _INCLUDED.issuperset(included := given.get("include", ())):
            raise Untranslatable("an unknown value of include")
        chat: Json = {_FIELDS[name]: value for name, value in given.items() if name in _FIELDS}
        chat |= {"messages": messages_shown(given, earlier)} | _tools(given) | _shape(given)
        for last in _items(given)[-1:]:
            if last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED:
                chat |= {"add_generation_prompt": False, "continue_final_message": True}  # the model continues that
        if given.get("truncation") == "auto":
            chat["truncate_prompt_tokens"] = -1
        if LOGPROBS in included:
            chat |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
        return chat

    @staticmethod
    def history(answer: Json) -> Json:
        return (messages_of(dicts(answer.get("output"))) or [{"role": "assistant", "content": ""}])[-1]

    def refusal(self, error: Json) -> Json:
        """With the agent's own name of the field."""
        body: Json = loads(encode(error).replace(b"max_completion_tokens", b"max_output_tokens"))
        return body

    @cached_property
    def _functions(self) -> dict[str, _Function]:
        return {one.name: one for one in _functions(self.body.get("tools", ()))}

    def begun(self) -> Iterator[Json]:
        given = {"id": self.body.get("request_id") or _new_id("resp")}
        given |= {"created_at": self.told["created"], "model": self.told["model"]}
        self._response = _repeated(self.body) | given
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response)

    def opened(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Json]:
        self._said, self._tokens = "", []
        item: Json = _ITEMS[kind]
        if kind == "call":
            function = self._function = self._functions.get(name, _Function(name, {}, name))
            item = _ITEMS["custom" if function.is_custom else kind]
            item = item | {"call_id": call_id, "name": function.own, "namespace": function.namespace}
        self._item = item | {"id": _new_id(item["id"])}
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        if kind != "call":
            yield self._of_item("content_part.added", content_index=0, part=self._part([]))

    def added(self, text: str, choice: Json) -> Iterator[Json]:
        self._said += text
        if self.kind == "reasoning":
            yield self._of_item("reasoning_text.delta", content_index=0, delta=text)
        elif self.kind == "content":
            tokens = _logprobs(choice) if self._shows_logprobs else []
            self._tokens += tokens
            yield self._of_item("output_text.delta", content_index=0, delta=text, logprobs=[*map(_brief, tokens)])
        elif not self._function.is_custom:
            yield self._of_item("function_call_arguments.delta", delta=text)

    def closed(self) -> Iterator[Json]:
        if self.kind != "call":
            part = self._part(self._tokens or None)
            more: Json = {} if self.kind == "reasoning" else {"logprobs": []}
            yield self._of_item(f"{part['type']}.done", content_index=0, text=self._said, **more)
            yield self._of_item("content_part.done", content_index=0, part=part)
            done: Json = {"content": [part], "status": "completed"}
        elif not self._function.is_custom:
            yield self._of_item("function_call_arguments.done", arguments=self._said, name=self._function.own)
            done = {"arguments": self._said, "status": "completed"}
        else:
            if text := _custom_input(self._said):  # in one piece: it is the text of a JSON object's one member
                yield self._of_item("custom_tool_call_input.delta", delta=text)
            yield self._of_item("custom_tool_call_input.done", input=text)
            done = {"input": text}
        yield self._event("response.output_item.done", output_index=len(self._output), item=self._item | done)
        self._output.append(self._item | done)

    def ended(self) -> Iterator[Json]:
        usage = _usage(self.told.get("usage"))
        names = ("kv_transfer_params", "ec_transfer_params", "metrics")
        response = self._response | {name: self.told[name] for name in names if self.told.get(name)}
        response |= {"output": self._output, "status": "completed", "usage": usage}
        if self.choice["finish_reason"] == "length":
            response |= _cut(usage)
        yield self._event("response.completed", response=response)

    def error(self, error: Any) -> Json:
        fields = error if isinstance(error, dict) else {"message": str(error)}
        code, message = fields.get("code"), str(fields.get("message"))
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

    def _part(self, tokens: list[Json] | None) -> Json:
        if self.kind == "reasoning":
            return {"text": self._said, "type": "reasoning_text"}
        return {"annotations": [], "text": self._said, "type": "output_text", "logprobs": tokens}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(8)}"


def _cut(usage: Json | None) -> Json:
    """The fields of a response that its limit ended."""
    limit = {"max_output_tokens": usage["output_tokens"]} if usage else {}
    return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, **limit}


def _custom_input(arguments: str) -> str:
    """A custom tool's input: the one argument, or the entire text where there is none."""
    try:
        value = json.loads(arguments)[_CUSTOM_INPUT]
    except (ValueError, TypeError, LookupError):
        return arguments
    return value if isinstance(value, str) else arguments


def _logprobs(choice: Json) -> list[Json]:
    """The log-probabilities of a choice or chunk in this API's shape."""
    return [
        _token(token) | {"top_logprobs": [_token(top) for top in token.get("top_logprobs") or ()]}
        for token in (choice.get("logprobs") or {}).get("content") or ()
    ]


def _token(token: Json) -> Json:
    text = token["token"]
    return {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": token.get("logprob", -9999.0)}


def _brief(token: Json) -> Json:
    """A token's log-probability as a stream has it: without bytes."""
    return {
        name: [*map(_brief, value)] if name == "top_logprobs" else value
        for name, value in token.items()
        if name != "bytes"
    }


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


def _repeated(given: Json) -> Json:
    """A response with what it repeats of its request."""
    response = _RESPONSE | {name: value for name, value in given.items() if name in _RESPONSE}
    response |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params"))
    response |= {name: float(response[name]) for name in _NUMBERS}
    if response["temperature"] == 0:
        response["top_p"] = 1.0
    else:
        response["temperature"] = max(response["temperature"], _LEAST_TEMPERATURE)
    tools, choice = response["tools"], response["tool_choice"]
    response["tool_choice"] = _named(choice, tools) if tools or choice != "auto" else "none"
    response["tools"] = [*map(_filled, tools)]
    if LOGPROBS not in given.get("include", ()):
        response["top_logprobs"] = None
    if reasoning := given.get("reasoning"):
        response["reasoning"] = dict.fromkeys(_REASONING) | reasoning
    if (text := given.get("text")) is not None:
        form = text.get("format")
        if form and form["type"] == "json_schema":
            form = dict.fromkeys(_SCHEMA) | form
        response["text"] = {"format": form, "verbosity": text.get("verbosity")}
    return response


def _filled(tool: Json) -> Json:
    """A tool as the response repeats it."""
    filled = dict.fromkeys(_TOOLS[tool["type"]]) | tool
    return filled | {"tools": [*map(_filled, tool["tools"])]} if tool["type"] == "namespace" else filled
