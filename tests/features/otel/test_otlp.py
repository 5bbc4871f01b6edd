"""OTLP in: spans of the real OpenTelemetry SDK, and bodies by hand, sent to a real proxy."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from google.rpc.status_pb2 import Status as RpcStatus
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.trace import Status, StatusCode

from lightning_proxy.core.errors import InvalidRequest, LightningError
from lightning_proxy.features.otel.genai import action_of, request_of, response_of, tokens_of
from lightning_proxy.features.otel.otlp import read_spans

Running = Callable[..., AbstractAsyncContextManager[Any]]

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
ANSWERED = [{"role": "assistant", "parts": PARTS, "finish_reason": "tool_call"}]
CHAT: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-x",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.max_tokens": 64,
    "gen_ai.response.model": "gpt-x-1",
    "gen_ai.response.id": "resp-1",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.usage.input_tokens": 3,
    "gen_ai.usage.output_tokens": 2,
}
SAID = {
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    "gen_ai.input.messages": json.dumps(ASKED),
    "gen_ai.output.messages": json.dumps(ANSWERED),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "look", "parameters": {}}]),
}
TOKENS = {
    "lightning.prompt_token_ids": [1, 2, 3],
    "lightning.response_token_ids": [5, 6],
    "lightning.logprobs": [-0.5, -1.5],
}
TRACE = "0123456789abcdef0123456789abcdef"


class Instrumented:
    """An agent's process that exports what it did, as soon as it did it."""

    def __init__(self, url: str, compression: Compression = Compression.NoCompression, **resource: str) -> None:
        self.results: list[SpanExportResult] = []
        exporter = OTLPSpanExporter(endpoint=f"{url}/otlp/v1/traces", compression=compression, timeout=5)
        export = exporter.export

        def remembered(spans: Any) -> SpanExportResult:
            self.results.append(result := export(spans))
            return result

        exporter.export = remembered  # type: ignore[method-assign]
        named = {f"lightning.{name}": value for name, value in resource.items()}
        self._provider = TracerProvider(resource=Resource(named), shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("agent")

    def tell(self, name: str, attributes: dict[str, Any], *, error: str | None = None) -> str:
        """One span; its trace's id."""
        with self.tracer.start_as_current_span(name, attributes=attributes) as span:
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        self._provider.shutdown()


def by_hand(attributes: dict[str, Any], span_id: str = "00000000000000aa", **span: Any) -> dict[str, Any]:
    """An export in OTLP's JSON."""

    def value(of: Any) -> dict[str, Any]:
        if isinstance(of, list):
            return {"arrayValue": {"values": [value(one) for one in of]}}
        kind = {str: "stringValue", int: "intValue", float: "doubleValue"}[type(of)]
        return {kind: str(of) if isinstance(of, int) else of}

    told = [{"key": name, "value": value(of)} for name, of in attributes.items()]
    one = {"traceId": TRACE, "spanId": span_id, "name": "chat", "attributes": told, "kind": 3, "unknown": [1]}
    one |= {"startTimeUnixNano": "1700000000000000000", "endTimeUnixNano": "1700000001500000000"}
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [one | span]}]}]}


async def test_a_call_of_the_real_sdk_becomes_one_of_its_rollout(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:

        def agent() -> Instrumented:
            told = Instrumented(system.url, Compression.Gzip, rollout_id="r1", task_id="t1", rollout_mode="eval")
            told.tell("chat gpt-x", {**CHAT, **SAID, "gen_ai.agent.name": "my guide"})
            told.tell("embeddings", {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "e"})
            told.tell("GET /", {"http.request.method": "GET"})
            told.close()
            return told

        told = await asyncio.to_thread(agent)
        assert told.results == [SpanExportResult.SUCCESS] * 3
        _, rollout = await system.call("GET", "/rollouts/r1")
        _, transitions = await system.call("GET", "/rollouts/r1/transitions")
    assert (rollout["task_id"], rollout["mode"], rollout["agent"]) == ("t1", "eval", "my_guide")
    (call,) = rollout["calls"]
    assert (call["status"], call["upstream"], call["model"]) == ("ok", "otlp", "gpt-x-1")
    assert call["request"]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"at":"Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c0", "content": "a tower"},
    ]
    assert call["request"]["tools"] == [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert (call["request"]["temperature"], call["request"]["max_tokens"]) == (0.5, 64)
    assert call["response"]["choices"][0]["finish_reason"] == "tool_calls"
    assert [(tool["id"], tool["arguments"]) for tool in call["tool_calls"]] == [("c1", '{"at":"tower"}')]
    assert call["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (call["trainable"], call["policy_version"]) == (False, None)
    assert call["untrainable_reason"] == "reported through OpenTelemetry: no token ids from the upstream"
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


async def test_an_instrumented_openai_client_is_recorded_by_its_environment_alone(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{system.url}/otlp",
            "OTEL_RESOURCE_ATTRIBUTES": "lightning.rollout_id=r1,lightning.task_id=t1",
            "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
        }
        upstream = system.config.upstreams[0].base_url
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INSTRUMENTED_AGENT, upstream, env=os.environ | environment
        )
        assert await process.wait() == 0
        _, rollout = await system.call("GET", "/rollouts/r1")
        assert (await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 1}))[0] == 200
    assert (rollout["task_id"], len(rollout["calls"])) == ("t1", 1)
    call = rollout["calls"][0]
    assert [message["content"] for message in call["request"]["messages"]] == ["Be brief.", "hi"]
    assert call["request"]["temperature"] == 0.5
    message = call["response"]["choices"][0]["message"]
    assert (message["role"], message["content"].startswith("by base")) == ("assistant", True)
    assert (call["finish_reason"], call["usage"]["total_tokens"]) == ("stop", 5)


async def test_without_a_name_a_trace_is_a_rollout_and_tool_results_are_paired(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system:
        later = [*ASKED[:1], *ANSWERED, {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1"}]}]
        later[-1]["parts"][0]["response"] = "stairs"  # type: ignore[index]

        def agent() -> str:
            told = Instrumented(system.url)
            attributes = {"gen_ai.operation.name": "invoke_agent"}
            with told.tracer.start_as_current_span("invoke_agent", attributes=attributes):
                told.tell("chat", {**CHAT, **SAID})
                messages = {"gen_ai.input.messages": json.dumps(later), "gen_ai.response.id": "resp-2"}
                trace = told.tell("chat", CHAT | messages)
            told.close()
            return trace

        _, rollout = await system.call("GET", f"/rollouts/{await asyncio.to_thread(agent)}")
    assert [call["seq"] for call in rollout["calls"]] == [0, 1]
    assert rollout["calls"][0]["tool_calls"][0]["result"] == "stairs"
    assert rollout["status"] == "running"


async def test_tools_that_no_answer_asked_for_and_retrievers_are_actions_once(running: Running, tmp_path: Path) -> None:
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "retrieve", "lightning.rollout_id": "r1"}
    told = tool | {"gen_ai.tool.call.arguments": '{"query": "cats"}', "gen_ai.tool.call.result": '["a"]'}
    failed = by_hand(tool, "00000000000000cc", status={"code": 2, "message": "no index"})
    asked = {"gen_ai.operation.name": "retrieval", "gen_ai.request.model": "e", "lightning.rollout_id": "r1"}
    asked |= {"gen_ai.data_source.id": "cats", "gen_ai.retrieval.top_k": 2, "gen_ai.retrieval.query.text": "who purrs?"}
    asked |= {"gen_ai.retrieval.documents": json.dumps([{"id": "a", "score": 0.5}])}
    async with running(tmp_path) as system:
        for body in (
            by_hand(told),
            by_hand(told),
            failed,
            by_hand(asked, "00000000000000ee"),
            by_hand(tool | {"gen_ai.tool.call.id": "c1"}, "0" * 15 + "d"),
        ):
            assert await system.call("POST", "/otlp/v1/traces", body) == (200, {})
        _, transitions = await system.call("GET", "/rollouts/r1/transitions")
    actions = [(t["kind"], t["action"]["name"], t["action"]["arguments"], t["next_state"]) for t in transitions["data"]]
    assert actions == [
        ("tool", "retrieve", {"query": "cats"}, {"result": ["a"], "is_error": False}),
        ("tool", "retrieve", None, {"result": "no index", "is_error": True}),
        (
            "tool", "retrieval", {"query": "who purrs?", "top_k": 2, "data_source": "cats"},
            {"result": [{"id": "a", "score": 0.5}], "is_error": False},
        ),
    ]  # fmt: skip


async def test_with_tokens_and_a_policy_version_a_call_can_be_trained_on(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")

        def agent() -> None:
            told = Instrumented(system.url, rollout_id="r1")
            told.tell("chat", {**CHAT, **TOKENS, "lightning.policy_version": 0, "gen_ai.response.id": "a"})
            told.tell("chat", {**CHAT, **TOKENS, "gen_ai.response.id": "b"})
            short = {"lightning.logprobs": [-0.5], "lightning.policy_version": 0, "gen_ai.response.id": "c"}
            told.tell("chat", {**CHAT, **TOKENS, **short})
            told.tell("chat", {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}, error="overloaded")
            told.close()

        await asyncio.to_thread(agent)
        _, rollout = await system.call("GET", "/rollouts/r1?requests=whole")
        _, transitions = await system.call("GET", "/rollouts/r1/transitions")
    own, whole, unversioned, short, failed = rollout["calls"]
    assert (failed["status"], failed["error"], len(transitions["data"])) == ("error", "overloaded", 4)
    assert own["trainable"] and whole["trainable"]
    assert (whole["prompt_token_ids"], whole["response_token_ids"]) == ([1, 2, 3], [5, 6])
    assert (whole["logprobs"], whole["policy_versions"]) == ([-0.5, -1.5], [0])
    assert unversioned["untrainable_reason"].endswith("no policy version in the span")
    assert short["untrainable_reason"].endswith("2 token ids but 1 log-probabilities")


async def test_what_is_sent_again_or_went_through_the_proxy_counts_once(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        _, answer = await system.chat("r1")
        named = {"lightning.rollout_id": "r1"}
        for _ in range(2):
            await system.call("POST", "/otlp/v1/traces", by_hand(CHAT | named))
        await system.call("POST", "/otlp/v1/traces", by_hand(CHAT | named, "00000000000000bb"))
        await system.call(
            "POST", "/otlp/v1/traces", by_hand(CHAT | named | {"gen_ai.response.id": answer["id"]}, "0" * 15 + "c")
        )
        _, rollout = await system.call("GET", "/rollouts/r1")
    assert [call["upstream"] for call in rollout["calls"]] == ["otlp", "policy"], "by their times"


async def test_spans_that_cannot_be_taken_are_counted_and_the_others_recorded(running: Running, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"lightning.rollout_id": "a b"}, {}, "lightning.rollout_id must be"),
        ({"lightning.rollout_mode": "test"}, {}, "lightning.rollout_mode must be train or eval"),
        ({}, {"spanId": "00aa"}, "span id"),
        ({}, {"startTimeUnixNano": "0", "endTimeUnixNano": "0"}, "it has no time"),
        ({}, {"startTimeUnixNano": "x"}, "a span cannot be read"),
        ({}, {"events": [1]}, "a span cannot be read"),
    ]
    half = json.dumps([{"role": "half \ud83d", "content": "half \ud83d"}])  # of a character
    async with running(tmp_path) as system:
        for n, (attributes, span, why) in enumerate(wrong):
            told = CHAT | {"gen_ai.response.id": f"resp-{n}", "gen_ai.input.messages": half}
            body = by_hand(told, f"00000000000000a{n}")
            body["resourceSpans"] += by_hand(told | attributes, "00000000000000bb", **span)["resourceSpans"]
            status, answer = await system.call("POST", "/otlp/v1/traces", body)
            assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "1"), why
            assert why in answer["partialSuccess"]["errorMessage"]
        _, rollout = await system.call("GET", f"/rollouts/{TRACE}")
    assert len(rollout["calls"]) == len(wrong)


async def test_one_odd_span_is_a_problem_of_it_alone(running: Running, tmp_path: Path) -> None:
    deep = "[" * 200 + "]" * 200
    odd: list[dict[str, Any]] = [
        {"gen_ai.output.messages": text} for text in (deep, "[[[]]]", "[null]", '{"a": 1}', '[{"parts": [null, 1]}]')
    ]
    odd += [
        {"gen_ai.request.model": "half \ud83d"},
        {"gen_ai.usage.input_tokens": 2**62},
        {"lightning.policy_version": -1},
    ]
    odd += [
        {"lightning.prompt_token_ids": [2**40], "lightning.response_token_ids": [-1], "lightning.logprobs": [1e300]}
    ]
    body: dict[str, Any] = {"resourceSpans": [None, 1, {"resource": 1}, {"scopeSpans": [1]}]}
    for n, attributes in enumerate([*odd, {}]):
        rollout = "good" if n == len(odd) else "odd"
        told = CHAT | {"gen_ai.response.id": f"resp-{n}", "lightning.rollout_id": rollout} | attributes
        body["resourceSpans"] += by_hand(told, f"{n + 1:016x}")["resourceSpans"]
    body["resourceSpans"][-1]["scopeSpans"][0]["spans"] += [None, 1, {}]
    async with running(tmp_path) as system:
        status, answer = await system.call("POST", "/otlp/v1/traces", json.dumps(body).encode())
        assert status == 200 and int(answer["partialSuccess"]["rejectedSpans"]) < 8, answer
        for rollout, calls in (("odd", len(odd) - 1), ("good", 1)):
            assert len((await system.call("GET", f"/rollouts/{rollout}?requests=whole"))[1]["calls"]) >= calls
            assert (await system.call("GET", f"/rollouts/{rollout}/transitions"))[0] == 200


async def test_half_a_character_in_protobuf_is_no_fault(running: Running, tmp_path: Path) -> None:
    """Exporters of JavaScript send such bytes, which protobuf's own library refuses with the entire export."""
    request = ExportTraceServiceRequest()
    for i, text in enumerate(("x", "HALF")):
        span = request.resource_spans.add().scope_spans.add().spans.add()
        span.trace_id, span.span_id = bytes.fromhex(TRACE), bytes([0] * 7 + [i + 1])
        span.start_time_unix_nano = 1_700_000_000_000_000_000 + i
        for name, value in (CHAT | {"gen_ai.response.id": f"resp-{i}", "gen_ai.request.model": text}).items():
            pair = span.attributes.add(key=name)
            if isinstance(value, str):
                pair.value.string_value = value
    body = request.SerializeToString().replace(b"HALF", b"\xed\xa0\xbd!")
    async with running(tmp_path) as system:
        url, media = f"{system.url}/otlp/v1/traces", {"Content-Type": "application/x-protobuf"}
        async with system.session.post(url, data=body, headers=media) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        async with system.session.post(url, data=b"\xff", headers=media) as answer:
            assert (answer.status, answer.content_type) == (400, media["Content-Type"])
            assert RpcStatus.FromString(await answer.read()).code == 3
        _, rollout = await system.call("GET", f"/rollouts/{TRACE}")
    assert [call["request"]["model"][-1] for call in rollout["calls"]] == ["x", "!"]
    assert [call["latency_ms"] for call in rollout["calls"]] == [0, 0]


async def test_what_is_no_export_is_refused_as_otlp_says(running: Running, tmp_path: Path) -> None:
    refused: list[tuple[bytes, dict[str, str], tuple[int, int]]] = [
        (b"{", {}, (400, 3)),
        (b'{"resourceSpans": 1}', {}, (400, 3)),
        (b"{}", {"Content_Type": "text/plain"}, (415, 3)),
        (b"{}", {"Content_Encoding": "br"}, (415, 3)),
        (b"no gzip", {"Content_Encoding": "gzip"}, (400, 3)),
        (gzip.compress(b"{}")[:-4], {"Content_Encoding": "gzip"}, (400, 3)),
        (gzip.compress(b"{}") * 2, {"Content_Encoding": "gzip"}, (400, 3)),
        (gzip.compress(b" " * 1_100_000), {"Content_Encoding": "gzip"}, (413, 8)),
    ]
    async with running(tmp_path, max_body_mb=1) as system:
        for body, headers, expected in refused:
            status, answer = await system.call("POST", "/otlp/v1/traces", body, **headers)
            assert (status, answer["code"]) == expected and answer["message"], (body[:20], headers)


async def test_keys_are_asked_for_and_a_rollouts_key_is_for_that_rollout(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["k"]) as system:
        _, (one,) = await system.call("POST", "/rollouts", {}, Authorization="Bearer k")
        own = {"Authorization": f"Bearer {one['api_key']}"}
        assert (await system.call("POST", "/otlp/v1/traces", by_hand(CHAT)))[0] == 401
        assert (await system.call("POST", "/otlp/v1/traces", by_hand(CHAT), **own))[0] == 403
        ours = CHAT | TOKENS | {"lightning.rollout_id": one["rollout_id"], "lightning.policy_version": 0}
        for other in ({"lightning.rollout_mode": "eval"}, {"lightning.task_id": "easier"}):
            assert (await system.call("POST", "/otlp/v1/traces", by_hand(ours | other), **own))[0] == 403
        named = by_hand(ours)
        named["resourceSpans"] += by_hand(CHAT, "00000000000000bb")["resourceSpans"]
        status, answer = await system.call("POST", "/otlp/v1/traces", named, **own)
        assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "1")
        _, rollout = await system.call("GET", f"/rollouts/{one['rollout_id']}", Authorization="Bearer k")
        (call,) = rollout["calls"]
        assert "own key" in call["untrainable_reason"] and rollout["mode"] == "train"
        assert (await system.call("GET", f"/rollouts/{TRACE}", Authorization="Bearer k"))[0] == 404
        assert (await system.call("POST", "/otlp/v1/traces", by_hand(CHAT), Authorization="Bearer k"))[0] == 200


async def test_a_key_for_own_rollouts_reports_nothing_into_anothers(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        ann, bob = [await system.key(name, scope="own") for name in ("ann", "bob")]
        await system.chat("r1", **ann)
        status, answer = await system.call(
            "POST", "/otlp/v1/traces", by_hand(CHAT | {"lightning.rollout_id": "r1"}), **bob
        )
        assert (status, answer["code"]) == (404, 2), answer
        _, rollout = await system.call("GET", "/rollouts/r1", **ann)
        assert [call["upstream"] for call in rollout["calls"]] == ["policy"]


async def test_redaction_applies_also_to_an_end_that_comes_on_a_second_try(running: Running, tmp_path: Path) -> None:
    secret = {
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "pin 123456"}]}])
    }
    async with running(tmp_path, recording={"redact": {"patterns": [r"\d{6}"]}}) as system:
        spans = by_hand({**CHAT, **TOKENS, **secret, "lightning.policy_version": 0})
        for _ in range(2):
            await system.call("POST", "/otlp/v1/traces", spans)
            _, first = await system.call("GET", f"/rollouts/{TRACE}")
            async with system.store() as store:
                await store.database.commit([("UPDATE calls SET status = 'incomplete', response = NULL", [{}])])
        await system.call("POST", "/otlp/v1/traces", spans)
        _, rollout = await system.call("GET", f"/rollouts/{TRACE}")
    assert first["calls"] == rollout["calls"]
    (call,) = rollout["calls"]
    assert (call["status"], call["response"]["id"]) == ("ok", "resp-1")
    assert call["request"]["messages"][0]["content"] == "pin [redacted]"
    assert (call["prompt_token_ids"], call["untrainable_reason"]) == ([], "redacted")


async def test_other_paths_below_v1_still_go_to_the_upstream(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        status, answer = await system.call("POST", "/otlp/v1/metrics", {})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")


NAMES = st.sampled_from(
    ["role", "parts", "type", "content", "name", "id", "message", "messages", "tool_calls", "function"]
)
NUMBERED = [
    "gen_ai.prompt.0.content", "gen_ai.completion.0.tool_calls.0.id", "llm.model_name", "input.value", "output.value",
    "llm.invocation_parameters", "llm.input_messages.0", "llm.input_messages.0.message", "llm.tools.0.tool.json_schema",
    "llm.input_messages.0.message.contents.0.message_content.text", "retrieval.documents.0.document.content",
]  # fmt: skip
ATTRIBUTES = st.dictionaries(
    st.sampled_from([*CHAT, *SAID, *TOKENS, *NUMBERED]),
    st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(max_size=20),
        st.lists(st.integers(-1, 2**40), max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
            max_leaves=8,
        ).map(json.dumps),
    ),
)


@given(ATTRIBUTES, st.sampled_from(["chat", "execute_tool", "retrieval"]))
def test_no_attributes_break_the_reader(attributes: dict[str, Any], operation: str) -> None:
    named = attributes | {"gen_ai.operation.name": operation}
    tokens_of(named, response_of(named)), request_of(named), action_of(named, None)


@given(st.binary(max_size=200), st.sampled_from(["protobuf", "json"]))
def test_no_bytes_break_the_decoder(body: bytes, encoding: Any) -> None:
    try:
        read_spans(body, encoding)
    except InvalidRequest as error:
        assert isinstance(error, LightningError)
