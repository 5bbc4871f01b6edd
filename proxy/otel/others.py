"""Reads the spans of other conventions as GenAI's: OpenInference, Vercel's AI SDK, logfire and pydantic-ai. Pure.

OpenInference: https://arize-ai.github.io/openinference/spec/; Vercel: https://ai-sdk.dev/docs/ai-sdk-core/telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..json_text import dumps, loads

Json = dict[str, Any]
Attributes = Mapping[str, Any]

_INVOCATION = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")


def as_genai(attributes: Attributes) -> Attributes:
    """Return a span's attributes with their GenAI equivalents added. Its own GenAI attributes stay."""
    for read in (_openinference, _vercel, _events, _logfire):
        if found := read(attributes):
            return {**{name: value for name, value in found.items() if value not in (None, [])}, **attributes}
    return attributes


def parsed(value: Any) -> Any:
    """Return the value of an attribute: on spans, most structures are JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError:
        return value


def _openinference(attributes: Attributes) -> Json:
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
    numbered = [_message(one["message"]) for one in _listed(_tree(attributes, prefix)) if _is_tree(one, "message")]
    if numbered or unnumbered not in attributes:
        return numbered
    value = parsed(attributes[unnumbered])
    messages = value.get("messages") if isinstance(value, dict) else value
    if isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages):
        return messages
    if isinstance(value, dict) and isinstance(value.get("choices"), list):
        return [one["message"] for one in value["choices"] if _is_tree(one, "message")]
    return [{"role": role, "content": value if isinstance(value, str) else attributes[unnumbered]}]


def _message(message: Json) -> Json:
    parts = [_inner(one, "message_content") for one in _listed(message.get("contents"))]
    calls = [_inner(one, "tool_call") for one in _listed(message.get("tool_calls"))]
    found: Json = {name: message[name] for name in ("name", "tool_call_id") if name in message}
    found |= {"role": message.get("role"), "content": message.get("content")}
    if parts and not isinstance(found["content"], str):
        found["content"] = joined([_content(part) for part in parts])
    if calls:
        found["tool_calls"] = [_called(call.get("id"), call.get("function")) for call in calls]
    elif "function_call_name" in message:
        function = {"name": message["function_call_name"], "arguments": message.get("function_call_arguments_json")}
        found["tool_calls"] = [_called(None, function)]
    return found


def _content(part: Json) -> Json:
    if _is_tree(part, "image"):
        return {"type": "image_url", "image_url": part["image"].get("image", part["image"])}
    return {"type": str(part.get("type") or "text"), **{name: part[name] for name in part if name != "type"}}


def _called(call_id: Any, function: Any) -> Json:
    named = function if isinstance(function, dict) else {}
    made = {"name": str(named.get("name") or ""), "arguments": _text(named.get("arguments"))}
    return {"id": call_id, "type": "function", "function": made}


def _vercel(attributes: Attributes) -> Json:
    """The span of one request (`….doGenerate`, `….doStream`), not the one around several (`ai.generateText`)."""
    if not isinstance(attributes.get("ai.operationId"), str) and "ai.prompt.messages" not in attributes:
        return {}
    if "ai.prompt.messages" not in attributes:
        return {"gen_ai.operation.name": attributes["ai.operationId"]}
    first = _chooser(attributes)
    prompt = parsed(attributes["ai.prompt.messages"])
    tools = attributes.get("ai.prompt.tools")
    calls = parsed(first("ai.response.toolCalls", "ai.result.toolCalls"))
    thought, answer = first("ai.response.reasoning"), first("ai.response.text", "ai.result.text", "ai.response.object")
    message: Json = {"role": "assistant", "content": answer}
    message |= {"reasoning_content": thought} if thought else {}
    made = [_vercel_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    message |= {"tool_calls": made} if made else {}
    reason = first("ai.response.finishReason", "ai.finishReason")
    messages = (
        [one for one_message in prompt for one in _vercel_message(one_message)] if isinstance(prompt, list) else []
    )
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": first("ai.model.id"),
        "gen_ai.response.model": first("ai.response.model"),
        "gen_ai.response.id": first("ai.response.id"),
        "gen_ai.input.messages": messages,
        "gen_ai.output.messages": [message | ({"finish_reason": _dashed(reason)} if reason else {})],
        "gen_ai.tool.definitions": [_vercel_tool(parsed(tool)) for tool in tools] if isinstance(tools, list) else [],
        "gen_ai.usage.input_tokens": first("ai.usage.inputTokens", "ai.usage.promptTokens"),
        "gen_ai.usage.output_tokens": first("ai.usage.outputTokens", "ai.usage.completionTokens"),
    }


def _vercel_message(message: Any) -> Iterator[Json]:
    """The chat messages in one of the SDK's, whose results of tools are parts of one message."""
    if not isinstance(message, dict):
        return
    if not isinstance(message.get("content"), list):
        yield {"role": message.get("role"), "content": message.get("content")}
        return
    content, calls, thought = [], [], []
    for part in (part for part in message["content"] if isinstance(part, dict)):
        match part.get("type"):
            case "tool-call":
                calls.append(_vercel_call(part))
            case "tool-result":
                result = part.get("output", part.get("result"))
                value = result.get("value") if isinstance(result, dict) and "value" in result else result
                yield {"role": "tool", "tool_call_id": part.get("toolCallId"), "content": _text(value)}
            case "reasoning":
                thought.append(_text(part.get("text")))
            case _:
                content.append({name: value for name, value in part.items() if name != "providerOptions"})
    if content or calls or thought:
        found: Json = {"role": message.get("role"), "content": joined(content)}
        more = {"reasoning_content": "".join(thought), "tool_calls": calls}
        yield found | {name: value for name, value in more.items() if value}


def _vercel_call(call: Json) -> Json:
    arguments = call.get("input", call.get("args"))
    return _called(call.get("toolCallId"), {"name": call.get("toolName"), "arguments": arguments})


def _vercel_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    schema = {"parameters": tool["inputSchema"]} if "inputSchema" in tool else {}
    return {name: value for name, value in tool.items() if name != "inputSchema"} | schema


def _events(attributes: Attributes) -> Json:
    """The `events` of pydantic-ai's first version: one for each message, `gen_ai.choice` for the answer."""
    events = parsed(attributes.get("events"))
    if not isinstance(events, list) or "gen_ai.request.model" not in attributes:
        return {}
    messages, answers = [], []
    for event in (one for one in events if isinstance(one, dict)):
        name = str(event.get("event.name", ""))
        if name == "gen_ai.choice" and _is_tree(event, "message"):
            answers.append(_evented({"role": "assistant"} | event["message"]))
        elif name.startswith("gen_ai.") and name.endswith(".message"):
            messages.append(_evented({"role": name[len("gen_ai.") : -len(".message")]} | event))
    given = parsed(attributes.get("model_request_parameters"))
    tools = given.get("function_tools") if isinstance(given, dict) else None
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": messages,
        "gen_ai.output.messages": answers,
        "gen_ai.tool.definitions": [_pydantic_tool(tool) for tool in tools] if isinstance(tools, list) else [],
    }


def _evented(event: Json) -> Json:
    found = {name: event[name] for name in ("role", "content", "tool_calls", "name") if name in event}
    if isinstance(content := found.get("content"), list):
        parts = [part if isinstance(part, dict) else {"kind": "text", "text": _text(part)} for part in content]
        found["content"] = joined([{"type": part.get("kind"), **part} for part in parts])
    return found | ({"tool_call_id": event["id"]} if event.get("role") == "tool" and "id" in event else {})


def _pydantic_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    kept = {name: tool[name] for name in ("name", "description") if tool.get(name)}
    return kept | {"parameters": tool.get("parameters_json_schema") or {}}


def _logfire(attributes: Attributes) -> Json:
    """The request and response of logfire's own instrumentation of OpenAI's and Anthropic's clients."""
    request, response = parsed(attributes.get("request_data")), parsed(attributes.get("response_data"))
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        return {}
    message = response.get("message") if isinstance(response, dict) else None
    if message is None and isinstance(response, dict) and "combined_chunk_content" in response:
        message = {"role": "assistant", "content": response["combined_chunk_content"]}
    usage: Json = response["usage"] if _is_tree(response, "usage") else {}
    system = (
        [{"role": "system", "content": request["system"]}] if request.get("system") else []
    )  # of Anthropic's client
    return {
        # The span of a streamed request ends with its first byte; the answer is in another span.
        "gen_ai.operation.name": "stream" if request.get("stream") and message is None else "chat",
        "gen_ai.request.model": request.get("model"),
        "gen_ai.input.messages": system + request["messages"],
        "gen_ai.output.messages": [message] if isinstance(message, dict) else [],
        "gen_ai.tool.definitions": request.get("tools"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
    }


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


def _chooser(attributes: Attributes) -> Any:
    return lambda *names: next((attributes[name] for name in names if attributes.get(name) is not None), None)


def _dashed(reason: Any) -> str:
    """A reason as chat names it: tool_calls, where the SDK has tool-calls."""
    return str(reason).replace("-", "_")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value)
