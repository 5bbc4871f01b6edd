"""The same requests to a real vLLM's own /v1/responses and, translated, to its chat route: the answers must agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from openai.types.responses.tool import Tool
from pydantic import TypeAdapter

from contract.real import System
from lightning_proxy.proxy.dialects.as_chat.responses import ResponsesTranslator
from support.models import TEMPLATE
from support.served import own_vllm
from support.twice import assert_same, in_one_piece, native, same, through_chat

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(900)]

Json = dict[str, Any]

NAME = "speller"
ZOE = "Say hello to Zoë, in French."
SAY = [{"role": "user", "content": ZOE}]
DIGITS = {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}}
SCHEMA = {"type": "object", "properties": DIGITS, "required": ["a", "b"]}
ADD = {"type": "function", "name": "add", "description": "adds two digits", "parameters": SCHEMA, "strict": False}
MULTIPLY = {"type": "function", "name": "multiply", "parameters": SCHEMA, "strict": None}
PATCH = {"type": "custom", "name": "patch", "description": "changes a file"}
MAIL = {"type": "namespace", "name": "mail", "description": "letters", "tools": [ADD | {"name": "send"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}', "id": "fc_1"}
TWICE = {"call_id": "c2"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
TREE = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
PART = {"type": "output_text", "text": "Salut"}


def item(text: str, **more: Any) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part]} | more


def thought(text: str, **more: Any) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content} | more


def said(text: str) -> Json:
    """The model says this and nothing else."""
    return {"structured_outputs": {"choice": [text]}, "max_output_tokens": 200}


def calls(*named: str, before: str = "") -> Json:
    parts = [one.split(" ", 1) for one in named]
    texts = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in parts]
    return said(before + "\n".join(texts))


ONE, TWO = 'add {"a": 1, "b": 2}', 'multiply {"a": 3, "b": 4}'
HISTORY = [*SAY, CALL, RESULT, item("It is 3."), {"role": "user", "content": "again"}]

ASKED: Json = {"model": NAME, "temperature": 0, "max_output_tokens": 12, "input": SAY}
TEXT: list[Json] = [
    {"input": "😀 héllo \u2028 \"quoted\" \\", "instructions": "Be brief."},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]},
    {"input": [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}, *SAY]},
    {"input": [*SAY, item("one"), item("two", id="msg_2"), {"role": "user", "content": "😀"}], "instructions": ""},
    {"input": [*SAY, {"role": "assistant", "content": "Bonjour"}, *SAY]},
    {"input": [*SAY, thought("Zoë is French."), {"type": "message", "role": "assistant", "content": [PART]}, *SAY]},
    {"input": [*SAY, thought("x", content=None, summary=[{"type": "summary_text", "text": "y"}]), item("Salut"), *SAY]},
    {"input": [*SAY, item("Bonj", status="incomplete")]},
    {"max_output_tokens": 1},
    {"stop": "e", "include_stop_str_in_output": True},
    {"include": ["reasoning.encrypted_content"], "top_logprobs": 3},
    {"presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "min_p": 0.1},
    {"logit_bias": {"42": 50}, "ignore_eos": True, "seed": 3, "top_k": 5, "priority": 0},
    {"top_p": 0.5, "temperature": 0.000001, "seed": 1},
    {"reasoning": {"effort": "low", "summary": "auto"}, "include_reasoning": False},
    {"metadata": {"a": "b"}, "user": "me", "service_tier": "flex", "store": False, "max_tool_calls": 3},
    {"truncation": "auto", "prompt_cache_key": "x", "safety_identifier": "y", "unknown": [1]},
    {"chat_template_kwargs": {"x": 1}, "cache_salt": "salt", "parallel_tool_calls": False},
    {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": TREE, "strict": True}}},
    said(" \n"),
]  # fmt: skip
TOOLS: list[Json] = [
    {"tools": [ADD], "tool_choice": "none"},
    {"tools": [ADD | {"strict": True}, MULTIPLY], "tool_choice": "required", "max_output_tokens": 40},
    {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 10},
    {"tools": [ADD, MULTIPLY], **calls(ONE, TWO, ONE, before="All: ")},
    {"tools": [ADD, MULTIPLY], **calls(ONE, TWO), "parallel_tool_calls": False},
    {"tools": [ADD], **calls(ONE), "max_output_tokens": 25},
    {"tools": [ADD], **calls(ONE, before="So: ")},
    {"tools": [ADD], **calls('unknown {"é": ["\\n", 1.50, null]}')},
    {"tools": [ADD], **said("<tool_call>\n{broken\n</tool_call>")},
    {"tools": [PATCH], **calls('patch {"input": "+ 😀 \\"a\\"\\n\\u00e9\\ud83d\\ude00"}')},
    {"tools": [PATCH], **calls('patch {"wrong": "a"}')},
    {"tools": [PATCH, ADD], "tool_choice": {"type": "custom", "name": "patch"}, "max_output_tokens": 24},
    {"tools": [MAIL, {"type": "web_search"}], **calls('mail__send {"a": 1}')},
    {"tools": [MAIL], "tool_choice": {"type": "function", "name": "mail__send"}, "max_output_tokens": 24},
    {"input": HISTORY, "tools": [ADD], "instructions": "Be brief."},
    {"input": [*SAY, thought("I add."), item("So:"), CALL, CALL | TWICE, RESULT, RESULT | TWICE]},
    {"input": [*SAY, CALL, RESULT | {"output": [{"type": "input_text", "text": t} for t in ("3", "4")]}]},
    {"input": [*SAY, {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+ a"},
               {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}], "tools": [PATCH]},
    {"input": [*SAY, CALL | {"namespace": "mail", "name": "send"}, RESULT], "tools": [MAIL]},
]  # fmt: skip
REFUSED: list[Json] = [
    {"temperature": "hot"},
    {"max_output_tokens": 100_000},
    {"input": "word " * 3000},
    {"model": "nobody"},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,xyz"}]}]},
]  # fmt: skip


# A stream says all that a whole answer says, so whole ones are for test-all.
WHOLE_OR_STREAM = pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.long), True], ids=["whole", "stream"]
)


@pytest.fixture(scope="module")
def vllm(merged: System) -> str:
    return f"http://127.0.0.1:{merged.vllm_port}/v1"


@WHOLE_OR_STREAM
@pytest.mark.parametrize("body", TEXT + TOOLS, ids=lambda body: json.dumps(body)[:60])
def test_answers_agree(vllm: str, body: Json, stream: bool) -> None:
    assert_same(vllm, ASKED | body | {"stream": stream})


def test_a_limit_that_nobody_named_is_not_told_before_it_is_met(vllm: str) -> None:
    """vLLM's own route tells what is left of the context."""
    body = {"model": NAME, "temperature": 0, "input": SAY} | said("hi")
    del body["max_output_tokens"]
    (own,), (ours,) = native(vllm, body).events, through_chat(vllm, body).events
    assert same(ours | {"max_output_tokens": own["max_output_tokens"]}) == same(own)
    assert ours["max_output_tokens"] is None
    body = {"model": NAME, "temperature": 0, "input": "word " * 990}
    (own,), (ours,) = native(vllm, body).events, through_chat(vllm, body).events
    assert same(ours) == same(own)
    assert ours["status"] == "incomplete"


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: json.dumps(body)[:60])
def test_what_vllm_refuses_is_refused(vllm: str, body: Json) -> None:
    own, ours = native(vllm, ASKED | body), through_chat(vllm, ASKED | body)
    assert ours.status == own.status >= 400
    assert ours.events[0]["error"] == own.events[0]["error"]


CALLS = [
    ("add", '{"a": 1}'),
    ("patch", json.dumps({"input": '+ \u00e9\U0001f600\n"a"'})),
    ("patch", '{"x": 1}'),
    ("mail__send", "{}"),
]


def some_deltas(seed: int) -> list[Json]:
    """What parsers say piece by piece, in any order; now and then several things at once, or nothing."""
    random = Random(seed)
    deltas: list[Json] = []
    for index in range(random.randint(1, 5)):
        match random.choice(["reasoning", "content", "calls", "both", "nothing"]):
            case "calls":
                name, arguments = random.choice(CALLS)
                cuts = sorted(random.choices(range(len(arguments) + 1), k=random.randint(0, 4)))
                pieces = [{"arguments": arguments[i:j]} for i, j in pairwise([0, *cuts, len(arguments)])]
                pieces[0]["name"] = name
                one: list[Json] = [{"index": index, "function": piece} for piece in pieces]
                one[0]["id"] = f"call_{index}"
                deltas += [{"tool_calls": [call]} for call in one]
            case "both":
                deltas.append({"reasoning": "hm", "content": random.choice(["", "so"])})
            case "nothing":
                deltas.append({})
            case what:
                deltas += [{what: random.choice(["", "a", "\u00e9\n"])} for _ in range(random.randint(1, 3))]
    return deltas


def vllms_events(tools: list[Json], deltas: list[Json]) -> list[Json]:
    """What vLLM's own code makes of the pieces that its parsers say."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta

    processor = SimpleStreamingEventProcessor(tools=TypeAdapter(list[Tool]).validate_python(tools))
    events: list[Any] = []
    for part in (part for delta in deltas for part in split_delta(DeltaMessage.model_validate(delta))):
        state, call = processor.resolve_target_state(part)
        if state.name != "NONE":
            if processor.needs_transition(state, call):
                events += [*processor.close_current(), *processor.open(state, call)]
            events += processor.emit_delta(part, None)  # type: ignore[arg-type]  # no log-probabilities
    return [json.loads(event.model_dump_json(by_alias=True)) for event in [*events, *processor.close_current()]]


def test_any_stream_becomes_the_events_that_vllm_makes_of_it() -> None:
    """Reasoning, custom tools and calls in any order, which this vLLM's model and parsers do not say."""

    tools = [ADD, PATCH, MAIL]
    for seed in range(300):
        deltas = some_deltas(seed)
        stream = ResponsesTranslator({"model": "m", "input": "x", "tools": tools})
        chunks = [{"created": 1, "model": "m", "choices": [{"delta": delta}]} for delta in deltas]
        ours = [event for chunk in chunks for event in stream.feed(chunk)] + list(stream.end())
        assert same(in_one_piece(ours[2:-1])) == same(in_one_piece(vllms_events(tools, deltas))), seed


THINKER, THOUGHTS = "thinker", "<think>I see.\nTwo.</think>"  # a second model, behind a vLLM of its own
CUSTOM = 'patch {"input": "+ 😀"}'
THINKING: list[tuple[list[str], Json]] = [
    (["reasoning", "message"], said(THOUGHTS + "Hello.")),
    (["reasoning"], said("it never ends")),
    (["reasoning"], said(THOUGHTS + "Hello.") | {"max_output_tokens": 4}),
    (["message"], said(THOUGHTS + "Hello.") | {"include_reasoning": False}),
    (["reasoning", "message", "function_call", "function_call"],
     calls(ONE, ONE, before=THOUGHTS + "So: ") | {"tools": [ADD]}),
    (["reasoning", "custom_tool_call"], calls(CUSTOM, before=THOUGHTS) | {"tools": [PATCH]}),
    (["reasoning", "message"], said(THOUGHTS + "Hello.") | {"input": [*SAY, thought("hm"), *SAY]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.models import save_thinking_model  # imports torch

    directory = tmp_path_factory.mktemp("thinking")
    options = ["--reasoning-parser", "deepseek_r1", "--enable-prompt-tokens-details"]
    options += ["--structured-outputs-config", json.dumps({"enable_in_reasoning": True})]
    with own_vllm(directory, save_thinking_model(directory / THINKER), TEMPLATE, *options) as url:
        yield url


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("items", "body"), THINKING)
def test_answers_with_thoughts_agree(thinking: str, items: list[str], body: Json, stream: bool) -> None:
    asked = {"model": THINKER, "temperature": 0, "max_output_tokens": 200, "input": SAY} | body
    answer = assert_same(thinking, asked | {"stream": stream})
    assert [item["type"] for item in answer["output"]] == items
