"""OTLP in: spans by hand, and of a real instrumented client. OTLP out: what a collector gets, if it is there."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import sys
import threading
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from google.rpc.status_pb2 import Status as RpcStatus
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from contract.raw import Upstream
from contract.system import played
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.features.otel.genai import (
    CALLS,
    action_of,
    is_action,
    operation_of,
    request_of,
    response_of,
)
from lightning_proxy.features.otel.otlp import read_spans
from lightning_proxy.proxy.app import create_app

Json = dict[str, Any]

LOOK: Json = {"type": "function", "function": {"name": "look", "parameters": {}}}
ASKED = [
    {"role": "user", "parts": [{"type": "text", "content": "What is in Paris?"}]},
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c0", "name": "look", "arguments": {"at": "Paris"}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c0", "response": "a tower"}]},
]
PARTS = [
    {"type": "reasoning", "content": "hm"},
    {"type": "text", "content": "Let me see."},
    {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "tower"}},
]
CHAT: Json = {
    "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-x",
    "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 64, "gen_ai.response.model": "gpt-x-1",
    "gen_ai.response.finish_reasons": ["stop"], "gen_ai.usage.input_tokens": 3,
    "gen_ai.usage.output_tokens": 2,
}  # fmt: skip
SAID = {
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    "gen_ai.input.messages": json.dumps(ASKED),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": PARTS, "finish_reason": "tool_call"}]),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "look", "parameters": {}}]),
}
TOKENS = {
    "lightning.prompt_token_ids": [1, 2, 3], "lightning.response_token_ids": [5, 6], "lightning.logprobs": [-0.5, -1.5],
}  # fmt: skip
TRACE, R1 = "0123456789abcdef0123456789abcdef", {"lightning.rollout_id": "r1"}
SECOND = 10**9
BEGAN = 1_700_000_000 * SECOND


def span(attributes: Json, number: int = 0xAA, **fields: Any) -> Json:
    """One in OTLP's JSON."""

    def value(of: Any) -> Json:
        if isinstance(of, list):
            return {"arrayValue": {"values": [value(one) for one in of]}}
        kind = {str: "stringValue", int: "intValue", float: "doubleValue"}[type(of)]
        return {kind: str(of) if isinstance(of, int) else of}

    told = [{"key": name, "value": value(of)} for name, of in attributes.items()]
    one = {"traceId": TRACE, "spanId": f"{number:016x}", "name": "chat", "attributes": told, "kind": 3, "unknown": [1]}
    return one | {"startTimeUnixNano": str(BEGAN), "endTimeUnixNano": str(BEGAN + SECOND)} | fields


def exported(*spans: Any) -> Json:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [*spans]}]}]}


async def post(system: Any, *spans: Any, **headers: str) -> Any:
    return await system.call("POST", "/otlp/v1/traces", exported(*spans), **headers)


async def taken(system: Any, *spans: Any) -> Any:
    """The rollout `r1` after posts of one span each."""
    for one in spans:
        assert await post(system, one) == (200, {})
    return await system.get("/rollouts/r1")


# What spans become ---------------------------------------------------------------------------------------------------


async def test_a_span_of_a_call_becomes_a_call_of_its_rollout(start: Any) -> None:
    named = R1 | {"lightning.task_id": "t1", "lightning.rollout_mode": "eval", "gen_ai.agent.name": "my guide"}
    embedded = R1 | {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "e"}
    spans = (span(CHAT | SAID | named), span(embedded, 1), span(R1 | {"http.request.method": "GET"}, 2))
    async with start() as system:
        assert await post(system, *spans) == (200, {})
        rollout = await system.get("/rollouts/r1")
        transitions = await system.get("/rollouts/r1/transitions")
    assert (rollout["task_id"], rollout["mode"], rollout["agent"]) == ("t1", "eval", "my_guide")
    (call,) = rollout["calls"]
    called = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"at":"Paris"}'}}
    assert call["request"] == {
        "model": "gpt-x", "temperature": 0.5, "max_tokens": 64,
        "tools": [LOOK],
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is in Paris?"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c0", "content": "a tower"},
        ],
    }  # fmt: skip
    assert [(tool["id"], tool["arguments"]) for tool in call["tool_calls"]] == [("c1", '{"at":"tower"}')]
    told = {
        "status": "ok", "upstream": "otlp", "model": "gpt-x-1", "finish_reason": "tool_calls", "policy_version": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}, "trainable": False,
        "untrainable_reason": "reported through OpenTelemetry: no token ids from the upstream",
    }  # fmt: skip
    assert call.items() >= told.items()
    (transition,) = transitions["data"]
    said = transition["action"]["message"]
    assert (transition["kind"], said["content"], said["reasoning_content"]) == ("llm", "Let me see.", "hm")


INSTRUMENTED_AGENT = """
import sys
import openai
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
OpenAIInstrumentor().instrument()
asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
with openai.OpenAI(base_url=sys.argv[1], api_key="unused") as client:
    client.chat.completions.create(model="base", temperature=0.5, messages=asked)
provider.shutdown()
"""


async def test_an_instrumented_openai_client_is_recorded_by_its_environment_alone(start: Any) -> None:
    async with start() as system:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{system.url}/otlp", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_RESOURCE_ATTRIBUTES": "lightning.rollout_id=r1,lightning.task_id=t1",
            "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
        }  # fmt: skip
        upstream = system.config.upstreams[0].base_url
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INSTRUMENTED_AGENT, upstream, env=os.environ | environment
        )
        assert await process.wait() == 0
        rollout = await system.get("/rollouts/r1")
    (call,) = rollout["calls"]
    assert [message["content"] for message in call["request"]["messages"]] == ["Be brief.", "hi"]
    assert call["request"]["temperature"] == 0.5
    assert call["response"]["choices"][0]["message"]["content"].startswith("by base")
    assert (rollout["task_id"], call["finish_reason"], call["usage"]["total_tokens"]) == ("t1", "stop", 5)


async def test_tools_that_no_answer_asked_for_and_retrievers_are_actions_once(start: Any) -> None:
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "retrieve", **R1}
    told = tool | {"gen_ai.tool.call.arguments": '{"query": "cats"}', "gen_ai.tool.call.result": '["a"]'}
    asked = {
        "gen_ai.operation.name": "retrieval", "gen_ai.request.model": "e", "gen_ai.data_source.id": "cats",
        "gen_ai.retrieval.top_k": 2, "gen_ai.retrieval.query.text": "who purrs?",
        "gen_ai.retrieval.documents": json.dumps([{"id": "a", "score": 0.5}]), **R1,
    }  # fmt: skip
    failed, of_a_call = span(tool, 0xCC, status={"code": 2, "message": "no index"}), tool | {"gen_ai.tool.call.id": "c"}
    async with start() as system:
        await taken(system, span(told), span(told), failed, span(asked, 0xEE), span(of_a_call, 0xD))
        transitions = await system.get("/rollouts/r1/transitions")
    query = {"query": "who purrs?", "top_k": 2, "data_source": "cats"}
    assert [
        (t["kind"], t["action"]["name"], t["action"]["arguments"], t["next_state"]) for t in transitions["data"]
    ] == [
        ("tool", "retrieve", {"query": "cats"}, {"result": ["a"], "is_error": False}),
        ("tool", "retrieve", None, {"result": "no index", "is_error": True}),
        ("tool", "retrieval", query, {"result": [{"id": "a", "score": 0.5}], "is_error": False}),
    ]


async def test_calls_have_the_agent_of_the_nearest_span_around_them(start: Any) -> None:
    around = [
        ({"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "the planner"}, 0),
        (CHAT, 1), ({}, 1), (CHAT, 3), ({"openinference.span.kind": "AGENT", "agent.name": "critic"}, 1), (CHAT, 5),
        (CHAT | {"gen_ai.agent.name": "own"}, 5),
    ]  # fmt: skip
    spans = [
        span(told, n, startTimeUnixNano=str(BEGAN + n * SECOND), parentSpanId=f"{parent:016x}")
        for n, (told, parent) in enumerate(around, 1)
    ]
    async with start() as system:
        assert await post(system, *reversed(spans)) == (200, {})
        rollout = await system.get(f"/rollouts/{TRACE}")
    assert [call["agent"] for call in rollout["calls"]] == ["the_planner", "the_planner", "critic", "own"]


async def test_with_tokens_and_a_policy_version_a_call_can_be_trained_on(start: Any) -> None:
    versioned = CHAT | TOKENS | R1 | {"lightning.policy_version": 0}
    spans = [
        span(versioned, 1),
        span(CHAT | TOKENS | R1, 2),
        span(versioned | {"lightning.logprobs": [-0.5]}, 3),
        span({"gen_ai.request.model": "m", **R1}, 4, status={"code": 2, "message": "overloaded"}),
    ]
    async with start() as system:
        for n, one in enumerate(spans):
            await post(system, one | {"startTimeUnixNano": str(BEGAN + n * SECOND)})
        await system.chat("r1")
        rollout = await system.get("/rollouts/r1?requests=whole")
        transitions = await system.get("/rollouts/r1/transitions")
    whole, unversioned, short, failed, own = rollout["calls"]
    assert (failed["status"], failed["error"], len(transitions["data"])) == ("error", "overloaded", 4)
    assert own["trainable"] and whole["trainable"] and whole["policy_versions"] == [0]
    assert {f"lightning.{name}": value for name, value in whole.items()}.items() >= TOKENS.items()
    assert unversioned["untrainable_reason"].endswith("no policy version in the span")
    assert short["untrainable_reason"].endswith("2 token ids but 1 log-probabilities")


async def test_what_is_sent_again_or_went_through_the_proxy_counts_once(start: Any) -> None:
    async with start() as system:
        _, answer = await system.chat("r1")
        told, through = (CHAT | R1 | {"gen_ai.response.id": one} for one in ("resp-1", answer["id"]))
        rollout = await taken(system, span(told), span(told), span(told, 0xBB), span(through, 0xC))
    assert [call["upstream"] for call in rollout["calls"]] == ["otlp", "policy"], "by their times"


# OpenInference's and OpenLLMetry's: `tests/cases/` has more

OPENINFERENCE = {
    "openinference.span.kind": "LLM", "llm.model_name": "m", "llm.token_count.prompt": 3,
    "llm.token_count.completion": 1,
    "llm.invocation_parameters": json.dumps({"temperature": 0.5, "max_tokens": 9, "other": [1]}),
    "llm.tools.0.tool.json_schema": json.dumps(LOOK),
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
}  # fmt: skip
MADE = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def read(told: Json) -> Any:
    """A call's request, and its answer's first choice and usage."""
    assert operation_of(told) in CALLS
    response = response_of(told)
    return request_of(told), response["choices"][0], response["usage"] and response["usage"]["total_tokens"]


def test_openinference_and_openllmetry_tell_tools_parts_and_results() -> None:
    request, choice, tokens = read(OPENINFERENCE)
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    assert request == {
        "model": "m", "temperature": 0.5, "max_tokens": 9,
        "tools": [LOOK],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
            {"role": "assistant", "content": None, "tool_calls": MADE},
            {"role": "tool", "tool_call_id": "c1", "content": "stairs"},
        ],
    }  # fmt: skip
    assert (choice["message"], tokens) == ({"role": "assistant", "content": "ok"}, 4)
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    for asks, messages in (("hi", asked[1:]), (json.dumps(asked), asked)):
        request, choice, _ = read({"openinference.span.kind": "LLM", "input.value": asks, "output.value": "ho"})
        assert (request["messages"], choice["message"]["content"]) == (messages, "ho")
    called = {"id": "c1", "name": "look", "arguments": "{}"}
    _, choice, tokens = read({
        "llm.request.type": "chat", "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.finish_reason": "tool_calls", "gen_ai.usage.prompt_tokens": 1,
        "gen_ai.usage.completion_tokens": 2,
        **{f"gen_ai.completion.0.tool_calls.0.{name}": value for name, value in called.items()},
    })  # fmt: skip
    assert (choice["finish_reason"], choice["message"]["tool_calls"], tokens) == ("tool_calls", MADE, 3)


def test_of_openinferences_spans_around_calls_a_retriever_alone_is_an_action() -> None:
    for kind in ("CHAIN", "TOOL", "AGENT", "EMBEDDING"):
        told = {"openinference.span.kind": kind, "llm.model_name": "m"}
        assert operation_of(told) not in CALLS and not is_action(told)
    told = {"openinference.span.kind": "RETRIEVER", "input.value": "up", "retrieval.documents.0.document.content": "up"}
    assert is_action(told) and action_of(told, None).result == [{"content": "up"}]


# What cannot be taken ------------------------------------------------------------------------------------------------


async def test_spans_that_cannot_be_taken_are_counted_and_the_others_recorded(start: Any) -> None:
    wrong: Any = [
        ({"lightning.rollout_id": "a b"}, {}, "lightning.rollout_id must be"),
        ({"lightning.rollout_mode": "test"}, {}, "lightning.rollout_mode must be train or eval"),
        ({}, {"spanId": "00aa"}, "span id"),
        ({}, {"startTimeUnixNano": "0", "endTimeUnixNano": "0"}, "the span has neither a start time"),
        ({}, {"startTimeUnixNano": "x"}, "a span cannot be read"),
        ({}, {"events": [1]}, "a span cannot be read"),
    ]
    half = {"gen_ai.input.messages": json.dumps([{"role": "half \ud83d", "content": "half \ud83d"}])}  # of a character
    async with start() as system:
        for n, (attributes, fields, why) in enumerate(wrong):
            status, answer = await post(system, span(CHAT | half, n + 1), span(CHAT | attributes, 0xBB, **fields))
            assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "1"), why
            assert why in answer["partialSuccess"]["errorMessage"]
        rollout = await system.get(f"/rollouts/{TRACE}")
    assert len(rollout["calls"]) == len(wrong)


async def test_one_odd_span_is_a_problem_of_it_alone(start: Any) -> None:
    texts = ("[" * 200 + "]" * 200, "[[[]]]", "[null]", '{"a": 1}', '[{"parts": [null, 1]}]')
    odd = [
        *({"gen_ai.output.messages": text} for text in texts),
        {"gen_ai.request.model": "half \ud83d"}, {"gen_ai.usage.input_tokens": 2**62}, {"lightning.policy_version": -1},
        {"lightning.prompt_token_ids": [2**40], "lightning.response_token_ids": [-1], "lightning.logprobs": [1e300]},
        {"llm.input_messages.0": "hi", "llm.input_messages.0.message.role": "user"},
    ]  # fmt: skip
    spans = [span(CHAT | told, n) for n, told in enumerate(odd, 1)]
    body = exported(*spans, span(CHAT | R1), None, 1, {})
    body["resourceSpans"] += [None, 1, {"resource": 1}, {"scopeSpans": [1]}]
    async with start() as system:
        answer = await system.post("/otlp/v1/traces", body)
        assert answer["partialSuccess"]["rejectedSpans"] == "6", answer
        for rollout, calls in ((TRACE, len(odd)), ("r1", 1)):
            assert len((await system.get(f"/rollouts/{rollout}?requests=whole"))["calls"]) == calls
            await system.get(f"/rollouts/{rollout}/transitions")


async def test_half_a_character_in_protobuf_is_no_fault(start: Any) -> None:
    """Exporters of JavaScript send such bytes, which protobuf's own library refuses with the entire export."""
    spans = [
        span(R1 | {"gen_ai.request.model": model}) | {"traceId": f"{'A' * 22}==", "spanId": id_}
        for model, id_ in (("x", "AAAAAAAAAAE="), ("HALF", "AAAAAAAAAAI="))
    ]
    request = ParseDict(exported(*spans), ExportTraceServiceRequest(), ignore_unknown_fields=True)
    body = request.SerializeToString().replace(b"HALF", b"\xed\xa0\xbd!")
    async with start() as system:
        url, media = f"{system.url}/otlp/v1/traces", {"Content-Type": "application/x-protobuf"}
        async with system.session.post(url, data=body, headers=media) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        async with system.session.post(url, data=b"\xff", headers=media) as answer:
            assert (answer.status, answer.content_type) == (400, media["Content-Type"])
            assert RpcStatus.FromString(await answer.read()).code == 3
        rollout = await system.get("/rollouts/r1")
    assert [call["request"]["model"][-1] for call in rollout["calls"]] == ["x", "!"]


async def test_what_is_no_export_is_refused_as_otlp_says(start: Any) -> None:
    packed = {"Content_Encoding": "gzip"}
    refused: Any = [
        (b"{", {}, (400, 3)),
        (b'{"resourceSpans": 1}', {}, (400, 3)),
        (b"{}", {"Content_Type": "text/plain"}, (415, 3)),
        (b"{}", {"Content_Encoding": "br"}, (415, 3)),
        (b"no gzip", packed, (400, 3)),
        (gzip.compress(b"{}")[:-4], packed, (400, 3)),
        (gzip.compress(b"{}") * 2, packed, (400, 3)),
        (gzip.compress(b" " * 1_100_000), packed, (413, 8)),
    ]
    async with start(max_body_mb=1) as system:
        for body, headers, expected in refused:
            status, answer = await system.call("POST", "/otlp/v1/traces", body, **headers)
            assert (status, answer["code"]) == expected and answer["message"], (body[:20], headers)
        status, answer = await system.call("POST", "/otlp/v1/metrics", {})
        assert (status, answer["error"]["type"]) == (404, "not_found_error")


async def test_without_the_packages_spans_are_refused_with_what_to_install(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lightning_proxy.features.otel.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "lightning_proxy.features.otel.otlp", None)
    async with start() as system:
        status, answer = await post(system)
    assert (status, "pip install 'lightning-proxy[otel]'" in answer["error"]["message"]) == (501, True)


async def test_keys_are_asked_for_and_a_rollouts_or_an_owners_key_is_for_its_own(start: Any) -> None:
    async with start(api_keys=["k"]) as system:
        everybodys = {"Authorization": "Bearer k"}
        (one,) = await system.post("/rollouts", {}, **everybodys)
        own = {"Authorization": f"Bearer {one['api_key']}"}
        assert (await post(system, span(CHAT)))[0] == 401
        assert (await post(system, span(CHAT), **own))[0] == 403
        named = {"lightning.rollout_id": one["rollout_id"]}
        status, answer = await post(system, span(CHAT | named), **await system.key("ann", scope="own"))
        assert (status, answer["code"]) == (404, 2), answer
        ours = CHAT | TOKENS | named | {"lightning.policy_version": 0}
        for other in ({"lightning.rollout_mode": "eval"}, {"lightning.task_id": "easier"}):
            assert (await post(system, span(ours | other), **own))[0] == 403
        status, answer = await post(system, span(ours), span(CHAT, 0xBB), **own)
        assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "1")
        rollout = await system.get(f"/rollouts/{one['rollout_id']}", **everybodys)
        (call,) = rollout["calls"]
        assert "own key" in call["untrainable_reason"] and rollout["mode"] == "train"
        assert (await system.call("GET", f"/rollouts/{TRACE}", **everybodys))[0] == 404
        assert (await post(system, span(CHAT), **everybodys))[0] == 200


async def test_redaction_applies_also_to_an_end_that_comes_on_a_second_try(start: Any) -> None:
    secret = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "pin 123456"}]}])
    told = span({**CHAT, **TOKENS, "gen_ai.input.messages": secret, "lightning.policy_version": 0})
    async with start(recording={"redact": {"patterns": [r"\d{6}"]}}) as system:
        await post(system, told)
        first = await system.get(f"/rollouts/{TRACE}")
        async with system.store() as store:
            await store.database.commit([("UPDATE calls SET status = 'incomplete', response = NULL", [{}])])
        await post(system, told)
        rollout = await system.get(f"/rollouts/{TRACE}")
    assert first["calls"] == rollout["calls"]
    (call,) = rollout["calls"]
    assert call["request"]["messages"][0]["content"] == "pin [redacted]"
    assert (call["status"], call["prompt_token_ids"], call["untrainable_reason"]) == ("ok", [], "redacted")


# What a collector receives --------------------------------------------------------------------------------------------


async def test_a_recorded_call_is_a_span_below_the_agents_own(start: Any) -> None:
    trace, parent = "ab" * 16, "cd" * 8
    named = {"X_Task_Id": "t", "X_Agent_Name": "a", "traceparent": f"00-{trace}-{parent}-01"}
    with played(collector := Upstream()) as at:
        telemetry, redact = {"otlp_endpoint": at, "otlp_headers": {"X-Team": "agents"}}, {"patterns": ["answered"]}
        async with start(otel=telemetry, recording={"redact": redact}) as system:
            asked = {"model": "policy", "temperature": 0.7, "messages": [{"role": "user", "content": "hi"}]}
            await system.post("/rollouts/r1/v1/chat/completions", asked, **named)
            await system.post("/v1/chat/completions", asked, X_Recording="off")
            system.vllm.status = 500
            await system.chat("r2")
            (call,) = (await system.get("/rollouts/r1"))["calls"]
    ok, failed = (one for seen in collector.seen for one in read_spans(seen.body, "protobuf")[0])
    assert (ok.trace_id, ok.parent_id, ok.error) == (trace, parent, None)
    assert b"chat policy" in collector.seen[0].body
    expected = {
        "service.name": "lightning-proxy", "gen_ai.operation.name": "chat", "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": 0.7, "gen_ai.response.model": "base", "gen_ai.response.id": "x1",
        "gen_ai.response.finish_reasons": ["stop"], "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2,
        "gen_ai.agent.name": "a", "lightning.rollout_id": "r1", "lightning.task_id": "t",
        "lightning.call_id": call["call_id"], "lightning.policy_version": 0, "lightning.trainable": True,
    }  # fmt: skip
    assert {name: ok.attributes.get(name) for name in expected} == expected
    assert not [name for name, value in ok.attributes.items() if "hi" in str(value).split()], "nothing that was said"
    assert ok.ended_at > ok.started_at
    assert (failed.attributes["error.type"], failed.error) == ("500", "the upstream [redacted] 500")
    assert {seen.headers["x-team"] for seen in collector.seen} == {"agents"}


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_a_collector_that_is_away_costs_no_call(start: Any, how: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if how == "hangs":  # it takes the spans in, and never answers
            taken.listen()
        at = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with start(otel={"otlp_endpoint": at}) as system:
            assert {(await system.chat(f"r{n}"))[0] for n in range(20)} == {200}
    for thread in threading.enumerate():
        if thread.name.startswith("Otel"):
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive(), "it still tries"


def test_without_the_sdk_the_configuration_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = Config.model_validate({"otel": {"otlp_endpoint": "http://127.0.0.1:4318"}})
    with pytest.raises(ConfigError, match=r"pip install 'lightning-proxy\[otel\]'"):
        create_app(config)
