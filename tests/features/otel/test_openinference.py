"""OpenInference's spans become calls, and calls get the agents of the spans around them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.otel.genai import CALLS, action_of, is_action, operation_of, request_of, response_of

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

Running = Callable[..., AbstractAsyncContextManager[Any]]
TRACE = "0123456789abcdef0123456789abcdef"
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}


def read(span: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    assert operation_of(span) in CALLS
    return request_of(span), response_of(span)


OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.invocation_parameters": json.dumps({"temperature": 0.5, "max_tokens": 9, "other": [1]}),
    "llm.tools.0.tool.json_schema": json.dumps({"type": "function", "function": {"name": "look", "parameters": {}}}),
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.contents.0.message_content.type": "text",
    "llm.input_messages.0.message.contents.0.message_content.text": "see",
    "llm.input_messages.0.message.contents.1.message_content.type": "image",
    "llm.input_messages.0.message.contents.1.message_content.image.image.url": "data:x",
    "llm.input_messages.1.message.role": "assistant",
    "llm.input_messages.1.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "look",
    "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": "{}",
    "llm.input_messages.2.message.role": "tool",
    "llm.input_messages.2.message.tool_call_id": "c1",
    "llm.input_messages.2.message.content": "stairs",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "ok",
    "llm.token_count.prompt": 3,
    "llm.token_count.completion": 1,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
MADE = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def test_openinference_tells_tools_parts_and_results() -> None:
    request, response = read(OPENINFERENCE)
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    assert request == {
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 9,
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
            {"role": "assistant", "content": None, "tool_calls": MADE},
            {"role": "tool", "tool_call_id": "c1", "content": "stairs"},
        ],
    }
    assert response["choices"][0]["message"] == {"role": "assistant", "content": "ok"}
    assert response["usage"]["total_tokens"] == 4
    plain = {"openinference.span.kind": "LLM", "input.value": "hi", "output.value": "ho"}
    request, response = read(plain)
    assert request["messages"] == [{"role": "user", "content": "hi"}]
    assert response["choices"][0]["message"]["content"] == "ho"


def test_openllmetry_numbers_messages_and_tool_calls() -> None:
    _, response = read({
        "llm.request.type": "chat",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.finish_reason": "tool_calls",
        "gen_ai.completion.0.tool_calls.0.id": "c1",
        "gen_ai.completion.0.tool_calls.0.name": "look",
        "gen_ai.completion.0.tool_calls.0.arguments": "{}",
        "gen_ai.usage.prompt_tokens": 1,
        "gen_ai.usage.completion_tokens": 2,
    })  # fmt: skip
    (choice,) = response["choices"]
    assert (choice["finish_reason"], choice["message"]["tool_calls"]) == ("tool_calls", MADE)
    assert response["usage"]["total_tokens"] == 3


def test_a_list_of_messages_is_openinferences_input() -> None:
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    request, _ = read({"openinference.span.kind": "LLM", "input.value": json.dumps(asked), "output.value": "ho"})
    assert request["messages"] == asked


@pytest.mark.parametrize("kind", ["CHAIN", "TOOL", "AGENT", "EMBEDDING"])
def test_spans_around_calls_are_none_themselves(kind: str) -> None:
    told = {"openinference.span.kind": kind, "llm.model_name": "m"}
    assert operation_of(told) not in CALLS and not is_action(told)


def test_a_retriever_of_openinference_is_one() -> None:
    told = {
        "openinference.span.kind": "RETRIEVER",
        "input.value": "stairs",
        "retrieval.documents.0.document.content": "up",
    }
    assert is_action(told) and action_of(told, None).result == [{"content": "up"}]


async def test_calls_have_the_agent_of_the_nearest_span_around_them(running: Running, tmp_path: Path) -> None:
    def agent(url: str) -> str:
        provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/otlp/v1/traces", timeout=5)))
        tracer = provider.get_tracer("agent")
        planner = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "the planner"}
        critic = {"openinference.span.kind": "AGENT", "agent.name": "critic"}
        with tracer.start_as_current_span("invoke_agent", attributes=planner) as outer:
            tracer.start_span("chat", attributes=CHAT).end()
            with tracer.start_as_current_span("chain"):
                tracer.start_span("chat", attributes=CHAT).end()
            with tracer.start_as_current_span("critic", attributes=critic):
                tracer.start_span("chat", attributes=CHAT).end()
                tracer.start_span("chat", attributes=CHAT | {"gen_ai.agent.name": "own"}).end()
            trace = f"{outer.get_span_context().trace_id:032x}"
        provider.shutdown()
        return trace

    async with running(tmp_path) as system:
        trace = await asyncio.to_thread(agent, system.url)
        _, rollout = await system.call("GET", f"/rollouts/{trace}")
        assert [call["agent"] for call in rollout["calls"]] == ["the_planner", "the_planner", "critic", "own"]
        for name in ("the_planner", "critic"):
            _, found = await system.call("GET", f"/rollouts?agent={name}")
            assert [one["rollout_id"] for one in found["data"]] == [trace]
