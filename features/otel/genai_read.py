"""Reads OpenTelemetry's GenAI attributes of a span as a chat call or an action. Pure.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. Messages come in the attributes of the conventions
(`gen_ai.input.messages`), or in the older numbered ones (`gen_ai.prompt.0.content`), which OpenLLMetry sends. Those
of OpenInference (https://arize-ai.github.io/openinference/spec/) are first made GenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.json_text import dumps, loads
from ...core.records import Event
from ...core.tokens import Tokens

Json = dict[str, Any]
Attributes = Mapping[str, Any]
CALLS = frozenset({"chat", "text_completion", "generate_content"})
RETRIEVAL = "retrieval"
_QUERY = {"query": "retrieval.query.text", "top_k": "retrieval.top_k", "data_source": "data_source.id"}
# A request's parameters by the names that they have in both.
_SAME = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")
_PARAMETERS = {**{name: name for name in _SAME}, "choice.count": "n"}
_INVOCATION = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")


def is_call(attributes: Attributes) -> bool:
    """Return whether the span is a model's answer, not an embedding, a tool or an agent."""
    named = attributes.get("gen_ai.operation.name", attributes.get("llm.request.type"))
    return named in CALLS if named is not None else "gen_ai.request.model" in attributes


def is_action(attributes: Attributes) -> bool:
    """Return whether the span is a retriever, or a tool that no model called.

    The results of tools that a model called are in the next request.
    """
    named = attributes.get("gen_ai.operation.name")
    return named == RETRIEVAL or (named == "execute_tool" and not attributes.get("gen_ai.tool.call.id"))


def action_of(attributes: Attributes, error: str | None) -> Event:
    """Return the agent's action and its result."""
    if attributes.get("gen_ai.operation.name") == RETRIEVAL:
        query = {name: attributes.get(f"gen_ai.{key}") for name, key in _QUERY.items()}
        name, result = RETRIEVAL, parsed(attributes.get("gen_ai.retrieval.documents"))
        arguments: Any = {name: value for name, value in query.items() if value is not None}
    else:
        name, result = attributes.get("gen_ai.tool.name") or "tool", parsed(attributes.get("gen_ai.tool.call.result"))
        arguments = parsed(attributes.get("gen_ai.tool.call.arguments"))
    return Event(
        "action",
        name=str(name)[:200],
        arguments=arguments,
        result=result if error is None or result is not None else error,
        is_error=error is not None,
    )


def request_of(attributes: Attributes) -> Json:
    """Return the call's request, as /v1/chat/completions takes it."""
    found: Json = {"model": attributes.get("gen_ai.request.model"), "messages": list(_input_messages(attributes))}
    for name, as_name in _PARAMETERS.items():
        value = attributes.get(f"gen_ai.request.{name}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[as_name] = value
    if isinstance(stop := attributes.get("gen_ai.request.stop_sequences"), list):
        found["stop"] = stop
    tools = parsed(attributes.get("gen_ai.tool.definitions"))
    tools = tools if isinstance(tools, list) else _numbered(attributes, "llm.request.functions")
    if tools:
        found["tools"] = [_tool(tool) for tool in tools]
    return found


def response_of(attributes: Attributes) -> Json:
    """Return the call's answer, as /v1/chat/completions gives it."""
    reasons = attributes.get("gen_ai.response.finish_reasons")
    messages = list(_answers(attributes))
    choices = []
    for index, message in enumerate(messages or [{"role": "assistant", "content": None}]):
        listed = reasons[index] if isinstance(reasons, list) and index < len(reasons) else None
        reason = message.pop("finish_reason", None) or listed
        choices.append({"index": index, "message": message, "finish_reason": _REASONS.get(str(reason), reason)})
    return {
        "id": attributes.get("gen_ai.response.id"),
        "object": "chat.completion",
        "model": attributes.get("gen_ai.response.model", attributes.get("gen_ai.request.model")),
        "choices": choices,
        "usage": _usage(attributes),
    }


_REASONS = {"tool_call": "tool_calls", "end_turn": "stop"}


def tokens_of(attributes: Attributes, response: Json) -> Tokens:
    """Return the token ids and log-probabilities that the span gives, if any, under the names in docs/client.md."""
    prompt, ids, logprobs = (
        _first(attributes, f"lightning.{name}", name) for name in ("prompt_token_ids", "response_token_ids", "logprobs")
    )
    first: Json = {"index": 0, "finish_reason": response["choices"][0]["finish_reason"], "token_ids": ids}
    if isinstance(logprobs, list):
        first["logprobs"] = {"content": [{"logprob": value} for value in logprobs]}
    more = [{"index": choice["index"]} for choice in response["choices"][1:]]
    tokens = Tokens()
    tokens.add({"prompt_token_ids": prompt, "choices": [first, *more], "usage": response["usage"]})
    return tokens


def _input_messages(attributes: Attributes) -> Iterator[Json]:
    system = parsed(attributes.get("gen_ai.system_instructions"))
    if system:
        yield from _message({"role": "system", "parts": system if isinstance(system, list) else [system]})
    messages = parsed(attributes.get("gen_ai.input.messages"))
    for message in messages if isinstance(messages, list) else _numbered(attributes, "gen_ai.prompt"):
        yield from _message(message)


def _answers(attributes: Attributes) -> Iterator[Json]:
    messages = parsed(attributes.get("gen_ai.output.messages"))
    for message in messages if isinstance(messages, list) else _numbered(attributes, "gen_ai.completion"):
        if isinstance(message, dict):
            reason = {"finish_reason": message["finish_reason"]} if message.get("finish_reason") else {}
            yield from (one | reason for one in _message({"role": "assistant"} | message))


def _message(message: Any) -> Iterator[Json]:
    """The chat messages in a message of the conventions, which has parts; a chat's own message stays as it is."""
    if not isinstance(message, dict):
        return
    if not isinstance(parts := message.get("parts"), list):
        yield {name: value for name, value in message.items() if name != "finish_reason"}
        return
    content, calls, thought = [], [], []
    for part in (part if isinstance(part, dict) else {"type": "text", "content": str(part)} for part in parts):
        match part.get("type"):
            case "tool_call":
                calls.append(_called(part.get("id"), part))
            case "tool_call_response":
                result = part.get("response", part.get("result"))
                yield {"role": "tool", "tool_call_id": part.get("id"), "content": _text(result)}
            case "text":
                content.append({"type": "text", "text": _text(part.get("content"))})
            case "reasoning" | "thinking":
                thought.append(_text(part.get("content")))
            case _:
                content.append(part)
    if content or calls or thought:
        more = {"reasoning_content": "".join(thought) or None, "tool_calls": calls or None}
        found = {"role": message.get("role"), "content": joined(content)}
        yield found | {name: value for name, value in more.items() if value is not None}


def _numbered(attributes: Attributes, prefix: str) -> list[Json]:
    """`prefix.0.role`, `prefix.0.tool_calls.1.name`, … as chat messages."""
    found: dict[int, Json] = {}
    calls: dict[tuple[int, int], Json] = {}
    for name, value in attributes.items():
        if match := re.fullmatch(re.escape(prefix) + r"\.(\d{1,4})\.(\w+)", name):
            found.setdefault(int(match[1]), {})[match[2]] = value
        elif match := re.fullmatch(re.escape(prefix) + r"\.(\d{1,4})\.tool_calls\.(\d{1,4})\.(\w+)", name):
            calls.setdefault((int(match[1]), int(match[2])), {})[match[3]] = value
    for (index, _), call in sorted(calls.items()):
        found.setdefault(index, {}).setdefault("tool_calls", []).append(_called(call.get("id"), call))
    return [message | _content(message.get("content")) for _, message in sorted(found.items())]


def _content(content: Any) -> Json:
    """The content that was text of a list of parts, as OpenLLMetry writes it; nothing for any other."""
    parts = parsed(content) if isinstance(content, str) and content.startswith("[{") else None
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in parts):
        return {}
    return {"content": joined(parts)}


def _tool(tool: Any) -> Any:
    """A tool's definition, with the `function` around it that chat has."""
    if not isinstance(tool, dict) or "function" in tool or "name" not in tool:
        return tool
    function = {name: value for name, value in tool.items() if name != "type"}
    if "parameters" in function:
        function["parameters"] = parsed(function["parameters"])  # OpenLLMetry has them as text
    return {"type": "function", "function": function}


def _usage(attributes: Attributes) -> Json | None:
    prompt = _first(attributes, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
    answer = _first(attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
    if not isinstance(prompt, int) or not isinstance(answer, int):
        return None
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _first(attributes: Attributes, *names: str) -> Any:
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value)


def as_genai(attributes: Attributes) -> Attributes:
    """Return a span's attributes with their GenAI equivalents added. Its own GenAI attributes stay."""
    found = {name: value for name, value in _genai(attributes).items() if value not in (None, [])}
    return {**found, **attributes}


def parsed(value: Any) -> Any:
    """Return the value of an attribute: on spans, most structures are JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError:
        return value


def _genai(attributes: Attributes) -> Json:
    kind = attributes.get("openinference.span.kind")
    if kind == "AGENT":
        return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": attributes.get("agent.name")}
    if kind == "RETRIEVER":
        found = [_inner(one, "document") for one in _listed(_tree(attributes, "retrieval.documents"))]
        query = attributes.get("input.value")
        named = {"gen_ai.operation.name": "retrieval", "gen_ai.retrieval.query.text": query}
        return named | {"gen_ai.retrieval.documents": found}
    if kind != "LLM":
        return {"gen_ai.operation.name": str(kind).lower()} if kind is not None else {}
    given = parsed(attributes.get("llm.invocation_parameters"))
    parameters = {f"gen_ai.request.{name}": given.get(name) for name in _INVOCATION} if isinstance(given, dict) else {}
    tools = [parsed(_inner(one, "tool").get("json_schema")) for one in _listed(_tree(attributes, "llm.tools"))]
    return parameters | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": attributes.get("llm.model_name"),
        "gen_ai.input.messages": _inferred(attributes, "llm.input_messages", "input.value", "user"),
        "gen_ai.output.messages": _inferred(attributes, "llm.output_messages", "output.value", "assistant"),
        "gen_ai.tool.definitions": [tool for tool in tools if isinstance(tool, dict)],
        "gen_ai.usage.input_tokens": attributes.get("llm.token_count.prompt"),
        "gen_ai.usage.output_tokens": attributes.get("llm.token_count.completion"),
    }


def _inferred(attributes: Attributes, prefix: str, unnumbered: str, role: str) -> list[Json]:
    """The numbered messages; where there are none, the span's one input or output."""
    numbered = [
        _nested_message(one["message"]) for one in _listed(_tree(attributes, prefix)) if _is_tree(one, "message")
    ]
    if numbered or unnumbered not in attributes:
        return numbered
    value = parsed(attributes[unnumbered])
    messages = value.get("messages") if isinstance(value, dict) else value
    if isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages):
        return messages
    if isinstance(value, dict) and isinstance(value.get("choices"), list):
        return [one["message"] for one in value["choices"] if _is_tree(one, "message")]
    return [{"role": role, "content": value if isinstance(value, str) else attributes[unnumbered]}]


def _nested_message(message: Json) -> Json:
    parts = [_inner(one, "message_content") for one in _listed(message.get("contents"))]
    calls = [_inner(one, "tool_call") for one in _listed(message.get("tool_calls"))]
    found: Json = {name: message[name] for name in ("name", "tool_call_id") if name in message}
    found |= {"role": message.get("role"), "content": message.get("content")}
    if parts and not isinstance(found["content"], str):
        found["content"] = joined([_nested_content(part) for part in parts])
    if calls:
        found["tool_calls"] = [_called(call.get("id"), call.get("function")) for call in calls]
    elif "function_call_name" in message:
        function = {"name": message["function_call_name"], "arguments": message.get("function_call_arguments_json")}
        found["tool_calls"] = [_called(None, function)]
    return found


def _nested_content(part: Json) -> Json:
    if _is_tree(part, "image"):
        return {"type": "image_url", "image_url": part["image"].get("image", part["image"])}
    return {"type": str(part.get("type") or "text"), **{name: part[name] for name in part if name != "type"}}


def _called(call_id: Any, function: Any) -> Json:
    named = function if isinstance(function, dict) else {}
    made = {"name": str(named.get("name") or ""), "arguments": _text(named.get("arguments"))}
    return {"id": call_id, "type": "function", "function": made}


def joined(content: list[Json]) -> Any:
    """Return a message's content: a string where it is text alone, as most clients send it."""
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content) if content else None
    return content


def _tree(attributes: Attributes, prefix: str) -> Json:
    """`prefix.0.message.role` and the like as nested objects."""
    root: Json = {}
    for name, value in attributes.items():
        if not name.startswith(prefix + "."):
            continue
        *path, last = name[len(prefix) + 1 :].split(".")
        node: Any = root
        for key in path:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault(last, value)
    return root


def _listed(tree: Any) -> list[Json]:
    """The objects among a tree's numbered branches, in order."""
    if not isinstance(tree, dict):
        return []
    numbered = sorted((int(key), key) for key in tree if key.isascii() and key.isdigit() and len(key) < 5)
    return [tree[key] for _, key in numbered if isinstance(tree[key], dict)]


def _inner(one: Json, name: str) -> Json:
    """The value below the name that a list's items have in OpenInference."""
    return one[name] if _is_tree(one, name) else one


def _is_tree(one: Any, name: str) -> bool:
    return isinstance(one, dict) and isinstance(one.get(name), dict)
