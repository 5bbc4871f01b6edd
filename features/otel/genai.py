"""Reads spans of GenAI, OpenLLMetry (`gen_ai.prompt.0.content`) and OpenInference as chat calls or actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...core.json_text import dumps, loads
from ...core.records import Event
from ...core.tokens import Tokens
from ...core.tools import dicts

Json = dict[str, Any]
Attributes = Mapping[str, Any]

CALLS = frozenset({"chat", "text_completion", "generate_content"})
# The names in GenAI, OpenLLMetry and OpenInference. The first that a span has counts.
OPERATION = ("gen_ai.operation.name", "llm.request.type", "openinference.span.kind")
MODEL = ("gen_ai.request.model", "llm.model_name")
INPUT = ("gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages", "input.value")
OUTPUT = ("gen_ai.output.messages", "gen_ai.completion", "llm.output_messages", "output.value")
TOOLS = ("gen_ai.tool.definitions", "llm.request.functions", "llm.tools")
PROMPT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
ANSWER_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
DOCUMENTS = ("gen_ai.retrieval.documents", "retrieval.documents")
QUERY = {
    "query": ("gen_ai.retrieval.query.text", "input.value"),
    "top_k": ("gen_ai.retrieval.top_k",),
    "data_source": ("gen_ai.data_source.id",),
}
# OpenInference's kinds of spans as GenAI's operations.
KINDS = {"LLM": "chat", "RETRIEVER": "retrieval", "AGENT": "invoke_agent"}
# A chat request's parameters, by their names in `gen_ai.request.…`.
PARAMETERS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_tokens", "seed": "seed",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "choice.count": "n",
}  # fmt: skip
# Levels of OpenInference's names that say nothing more: `tool_calls.0.tool_call.function.name`.
_WRAPPERS = frozenset({"message", "message_content", "tool_call", "function", "tool", "document", "image"})
_CHATS_REASONS = {"tool_call": "tool_calls", "end_turn": "stop"}


def operation_of(attributes: Attributes) -> str | None:
    """Return the span's operation, such as `chat` or `retrieval`; None if it is unknown."""
    named = first(attributes, OPERATION)
    if named is None:
        return "chat" if "gen_ai.request.model" in attributes else None
    return KINDS.get(str(named), str(named))


def is_action(attributes: Attributes) -> bool:
    """Return whether the span is a retrieval or a tool call that no model made."""
    operation = operation_of(attributes)
    return operation == "retrieval" or (operation == "execute_tool" and not attributes.get("gen_ai.tool.call.id"))


def action_of(attributes: Attributes, error: str | None) -> Event:
    if operation_of(attributes) == "retrieval":
        query = {name: first(attributes, names) for name, names in QUERY.items()}
        arguments: Any = {name: value for name, value in query.items() if value is not None}
        name, result = "retrieval", listed(attributes, DOCUMENTS) or parsed(attributes.get(DOCUMENTS[0]))
    else:
        name, result = attributes.get("gen_ai.tool.name") or "tool", parsed(attributes.get("gen_ai.tool.call.result"))
        arguments = parsed(attributes.get("gen_ai.tool.call.arguments"))
    result = error if result is None else result
    return Event("action", name=str(name)[:200], arguments=arguments, result=result, is_error=error is not None)


def request_of(attributes: Attributes) -> Json:
    """Return the call's request in the form of /v1/chat/completions."""
    system = parsed(attributes.get("gen_ai.system_instructions"))
    asked = [{"role": "system", "parts": system if isinstance(system, list) else [system]}] if system else []
    messages = [chat for one in (*asked, *listed(attributes, INPUT)) for chat in _chat_messages(one, "user")]
    found: Json = {"model": first(attributes, MODEL), "messages": messages}
    given = parsed(attributes.get("llm.invocation_parameters"))
    for name, field in PARAMETERS.items():
        value = attributes.get(f"gen_ai.request.{name}", given.get(field) if isinstance(given, dict) else None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[field] = value
    if isinstance(stop := attributes.get("gen_ai.request.stop_sequences"), list):
        found["stop"] = stop
    if tools := [tool for one in listed(attributes, TOOLS) if (tool := _chat_tool(one))]:
        found["tools"] = tools
    return found


def response_of(attributes: Attributes) -> Json:
    """Return the call's answer in the form of /v1/chat/completions."""
    reasons = attributes.get("gen_ai.response.finish_reasons")
    reasons = reasons if isinstance(reasons, list) else []
    answered = [
        (chat, one.get("finish_reason"))
        for one in listed(attributes, OUTPUT)
        for chat in _chat_messages(one, "assistant")
    ]
    choices = []
    for index, (message, own) in enumerate(answered or [({"role": "assistant", "content": None}, None)]):
        reason = own or next(iter(reasons[index:]), None)
        reason = _CHATS_REASONS.get(str(reason), reason)
        choices.append({"index": index, "message": message, "finish_reason": reason})
    prompt, answer = first(attributes, PROMPT_TOKENS), first(attributes, ANSWER_TOKENS)
    usage = None
    if isinstance(prompt, int) and isinstance(answer, int):
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    named = {"id": attributes.get("gen_ai.response.id"), "model": first(attributes, ("gen_ai.response.model", *MODEL))}
    return named | {"object": "chat.completion", "choices": choices, "usage": usage}


def tokens_of(attributes: Attributes, response: Json) -> Tokens:
    """Return the span's token ids and log-probabilities, if it has any (docs/client.md)."""
    names = ("prompt_token_ids", "response_token_ids", "logprobs")
    prompt, ids, logprobs = (first(attributes, (f"lightning.{name}", name)) for name in names)
    choices = [{"index": choice["index"]} for choice in response["choices"]]
    choices[0] |= {"finish_reason": response["choices"][0]["finish_reason"], "token_ids": ids}
    if isinstance(logprobs, list):
        choices[0]["logprobs"] = {"content": [{"logprob": value} for value in logprobs]}
    return Tokens({"prompt_token_ids": prompt, "choices": choices, "usage": response["usage"]})


def first(attributes: Attributes, names: Iterable[str]) -> Any:
    """Return the first of these attributes that the span has; None if it has none."""
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)


def listed(attributes: Attributes, names: Iterable[str]) -> list[Json]:
    """Return the list of objects in the first of these attributes that has one; [] if none does."""
    for name in names:
        value = parsed(attributes.get(name))
        if isinstance(value, dict):
            value = value.get("messages", value.get("choices"))
        if found := dicts(value) or dicts(_numbered(attributes, f"{name}.")):
            return [one["message"] if isinstance(one.get("message"), dict) else one for one in found]
        if name.endswith(".value") and name in attributes:
            return [{"content": attributes[name]}]
    return []


def parsed(value: Any) -> Any:
    """Return an attribute's value, parsed if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError:
        return value


def _numbered(attributes: Attributes, prefix: str) -> Any:
    """A list of objects, from attributes such as `PREFIX0.role` and `PREFIX0.tool_calls.1.name`."""
    root: Json = {}
    for name, value in attributes.items():
        if not name.startswith(prefix):
            continue
        node: Any = root
        *path, last = [key for key in name.removeprefix(prefix).split(".") if key not in _WRAPPERS] or [""]
        for key in path:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault(last, value)
    return _with_lists(root)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    numbers = sorted((key for key in tree if key.isascii() and key.isdigit() and len(key) < 5), key=int)
    if numbers:
        return [_with_lists(tree[key]) for key in numbers]
    return {key: _with_lists(value) for key, value in tree.items()}


def _chat_messages(told: Json, role: str) -> Iterator[Json]:
    """Yield the chat messages for one message of a span: one for each tool result, then one for the rest, if any."""
    parts = told.get("parts", told.get("contents", told.get("content")))
    if isinstance(parts, str) and parts.startswith("[{"):  # OpenLLMetry has a list of parts as text
        parts = parsed(parts)
    content, thoughts, called = list[Json](), list[str](), dicts(told.get("tool_calls"))
    for part in parts if isinstance(parts, list) else ():
        match part:
            case {"type": "tool_call"}:
                called.append(part)
            case {"type": "tool_call_response"}:
                result = part.get("response", part.get("result"))
                yield {"role": "tool", "tool_call_id": part.get("id"), "content": _text(result)}
            case {"type": "reasoning" | "thinking"}:
                thoughts.append(_text(part.get("content")))
            case {"type": "text"}:
                content.append({"type": "text", "text": _text(part.get("content", part.get("text")))})
            case {"type": "image", "url": url}:
                content.append({"type": "image_url", "image_url": {"url": url}})
            case _:
                content.append(part if isinstance(part, dict) else {"type": "text", "text": str(part)})
    if isinstance(parts, list) and not (content or thoughts or called):
        return
    ours = ("parts", "contents", "finish_reason", "tool_calls")
    message = {"role": role} | {name: value for name, value in told.items() if name not in ours}
    message["content"] = _joined(content) if isinstance(parts, list) else parts
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if called:
        message["tool_calls"] = [*map(_chat_call, called)]
    yield message


def _chat_call(call: Json) -> Json:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    made = {"name": str(function.get("name") or ""), "arguments": _text(function.get("arguments"))}
    return {"id": call.get("id"), "type": "function", "function": made}


def _chat_tool(tool: Json) -> Json | None:
    """A tool definition, wrapped in `function` as in chat; None if it cannot be read."""
    if "json_schema" in tool:  # OpenInference's
        schema = parsed(tool["json_schema"])
        return schema if isinstance(schema, dict) else None
    if "function" in tool or "name" not in tool:
        return tool
    function = {name: value for name, value in tool.items() if name != "type"}
    if "parameters" in function:
        function["parameters"] = parsed(function["parameters"])  # OpenLLMetry has them as text
    return {"type": "function", "function": function}


def _joined(content: list[Json]) -> Any:
    """A message's content: a string if it is only text, as most clients send it."""
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content) if content else None
    return content


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value)
