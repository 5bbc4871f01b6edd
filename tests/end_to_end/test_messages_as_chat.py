"""The same greedy requests to vLLM's own /v1/messages and, translated, to its chat route: the same answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from contract.real import System
from lightning_proxy.proxy.dialects.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import Template, Untranslatable
from support.served import own_vllm
from support.twice import message_through_chat as through_chat
from support.twice import native_message as native
from support.twice import prompts, template_of

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(900)]

Json = dict[str, Any]

SAY = "Say hello to Zoë, in French."
HELLO = {"messages": [{"role": "user", "content": SAY}]}
DIGITS = {name: {"type": "integer", "maximum": 9} for name in "ab"}
SCHEMA = {"type": "object", "properties": DIGITS, "required": ["a", "b"], "additionalProperties": False}
ADD = {"name": "add", "description": "adds two digits", "input_schema": SCHEMA}
NOW = {"name": "now", "input_schema": {"properties": {}, "additionalProperties": False}}
TOOLS = {"tools": [ADD, NOW]}
PICK = {"name": "pick", "input_schema": {"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}
STRICT = {"tools": [PICK | {"strict": True}, NOW | {"strict": True}]}  # vLLM holds only strict tools to their schema
ALONE = {"tools": [NOW | {"strict": True}]}
ANY = {"tool_choice": {"type": "any"}}
# The model begins a tool call more readily than one of these numbers.
NUMBER = {"output_config": {"format": {"type": "json_schema", "schema": {"enum": [0, 6, 8]}}}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def text(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


def conversation(*contents: Any) -> Json:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def used(name: str = "add", given: Any = None, number: int = 1) -> Json:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": given or {}}


def result(content: Any = None, number: int = 1, **more: Any) -> Json:
    block = {"type": "tool_result", "tool_use_id": f"toolu_{number}", **more}
    return block if content is None else block | {"content": content}


CASES: list[Json] = [
    # text
    {},
    conversation([text("Say"), text("hello.", cache_control={"type": "ephemeral"}), text("")]),
    conversation("One", [text("Two"), text("and a half")], [text("Three")]),
    conversation([], "Two", "Three"),
    conversation("One", [], '😀 \u2028 "quoted" \\ back'),
    conversation("One", "The answer begins: "),
    # what is sampled, and when it ends
    {"max_tokens": 1},
    {"stop_sequences": ["j"]},  # what it says most
    {"temperature": None, "top_k": 1, "stop_sequences": []},
    {"top_p": 0.5, "top_k": 3, "metadata": {"user_id": "somebody"}, "service_tier": "auto", "unknown": [1]},
    # the system's message
    {"system": "x-anthropic-billing-header: in text it stays"},
    {"system": [text("x-anthropic-billing-header: cc=1; hash=2"), text("Be brief."), text("Be kind.")]},
    {"messages": [{"role": "system", "content": [text("Be"), text("brief.")]}, *HELLO["messages"]]},
    {"system": "Be brief.", "messages": [*HELLO["messages"], {"role": "system", "content": "And kind."}]},
    {"messages": [*HELLO["messages"], {"role": "system", "content": "x-anthropic-billing-header: 1"}]},
    # tools
    TOOLS | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    TOOLS | {"tool_choice": {"type": "none"}},
    {"tools": [ADD | {"strict": True, "type": "custom"}, NOW | {"defer_loading": True, "description": ""}]},
    {"tool_choice": {"type": "auto"}},
    # tools that were used
    conversation(SAY, [text("I add."), used(given={"a": 1, "b": 2})], [result([text("3"), text("or so")])]) | TOOLS,
    conversation(SAY, [used(), used("now", number=2)], [result("2", 2), text("and"), result("1", 1)]) | TOOLS,
    conversation(SAY, [used(given={"é": [1.5, None]}), text("after it")], [result(is_error=True)]),
    conversation(SAY, [used()], [result([{"type": "document", "title": "left out"}, text("3")])]) | TOOLS,
    # thinking
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 3000},
    {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive", "display": "omitted"}},
    conversation("One", [THOUGHT, {"type": "redacted_thinking", "data": "eA=="}, text("Two")], "Three"),
    # a form for the answer
    TOOLS | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 40},
    {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    # refused by vLLM
    {"model": "nobody"},
    {"max_tokens": 100_000},
    conversation([text("See:"), {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/x.png"}}]),
    conversation(SAY, [used()], [result([text("3"), {"type": "image", "source": PIXEL}])]) | TOOLS,
]


# Requests that tools are called for; how the answer ends.
CALLS: list[tuple[Json, str]] = [
    (ALONE | NUMBER, "tool_use"),
    (STRICT | {"tool_choice": {"type": "tool", "name": "pick", "disable_parallel_tool_use": True}}, "tool_use"),
    (STRICT | ANY | {"max_tokens": 106}, "max_tokens"),  # two calls
    (STRICT | ANY | {"stop_sequences": ["</tool_call>"]}, "tool_use"),
    (STRICT | ANY | {"stop_sequences": ["}}"]}, "stop_sequence"),
    (STRICT | ANY | {"max_tokens": 24}, "max_tokens"),
]


# A stream says all that a whole answer says, so whole ones are for test-all.
WHOLE_OR_STREAM = pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.long), True], ids=["whole", "stream"]
)


@pytest.fixture(scope="module")
def template(merged: System) -> Template:
    return template_of(f"http://127.0.0.1:{merged.vllm_port}/v1", "speller")


@WHOLE_OR_STREAM
@pytest.mark.parametrize("case", CASES, ids=lambda case: re.sub(r"[\[\]]", "", json.dumps(case))[:90])
def test_the_chat_route_says_what_the_messages_route_says(
    merged: System, template: Template, case: Json, stream: bool
) -> None:
    url, body = asked(merged, case, stream)
    own, ours = prompts(url, body, template)
    assert ours == own
    assert through_chat(url, body, template) == native(url, body)


@WHOLE_OR_STREAM
@pytest.mark.parametrize(("case", "ends"), CALLS)
def test_so_it_is_with_tool_calls(merged: System, template: Template, case: Json, ends: str, stream: bool) -> None:
    url, body = asked(merged, {"max_tokens": 60} | case, stream)
    status, answer = through_chat(url, body, template)
    assert (status, answer) == native(url, body)
    assert ends in json.dumps(answer)


def asked(system: System, case: Json, stream: bool) -> tuple[str, Json]:
    body = HELLO | {"model": "speller", "max_tokens": 8, "temperature": 0, "stream": stream} | case
    return f"http://127.0.0.1:{system.vllm_port}/v1", body


RECITER = "reciter"  # a second model, which thinks, behind a vLLM of its own
RECITED = ["Ċ", "<think>", "h", "m", "</think>", "o", "k", "a", "y", "<|im_end|>"]  # after the line that begins it
# It refuses a later system message, shows an empty list of tools, and ends the thinking where there is to be none.
TEMPLATE = """
{%- if tools is defined and tools is not none %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('only the first may be a system message') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning %}{{ '<think>' + message.reasoning + '</think>' }}{% endif %}
{{- (message.content or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""
INLINE: Json = {"messages": [*HELLO["messages"], {"role": "system", "content": "Be brief."}]}
THINKING: list[tuple[list[str], Json]] = [
    (["thinking", "text"], {}),
    (["thinking", "text"], {"system": "Be kind.", "thinking": {"type": "adaptive", "display": "omitted"}}),
    (["thinking", "text"], {"stop_sequences": ["ay"]}),
    (["thinking"], {"stop_sequences": ["m"]}),
    (["thinking"], {"max_tokens": 3}),
    (["text"], INLINE | {"thinking": {"type": "disabled"}}),
    (["thinking", "text"], conversation(SAY, [THOUGHT, text("Yes?")], SAY)),
    (["thinking", "tool_use"], ALONE | {"tool_choice": {"type": "tool", "name": "now"}}),
]


@pytest.fixture(scope="module")
def reciting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.models import save_reciting_model  # imports torch

    directory = tmp_path_factory.mktemp("reciting")
    model = save_reciting_model(directory / RECITER, RECITED)
    with own_vllm(directory, model, TEMPLATE, "--reasoning-parser", "qwen3", "--enable-prompt-tokens-details") as url:
        yield url


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("blocks", "case"), THINKING)
def test_so_it_is_with_thoughts(reciting: str, blocks: list[str], case: Json, stream: bool) -> None:
    body = HELLO | {"model": RECITER, "max_tokens": 70, "temperature": 0, "stream": stream} | case
    native(reciting, body)  # fills vLLM's cache, which `usage` tells
    status, answer = through_chat(reciting, body, template_of(reciting, RECITER))
    assert (status, answer) == native(reciting, body)
    assert [block["type"] for block in (answer[-1] if stream else answer)["content"]] == blocks


@pytest.mark.long
def test_the_template_is_known_and_moves_system_messages_as_the_server_does(reciting: str) -> None:
    template = template_of(reciting, RECITER)
    assert template == Template(merges_system=True, disabled_effort="none", ignores_no_tools=False)
    body = {"model": RECITER, "max_tokens": 4, **INLINE, "system": "Be kind."}
    own, ours = prompts(reciting, body, template)
    assert ours == own and own[0] == 200
    with pytest.raises(Untranslatable, match="list of tools"):  # the template shows it
        MessagesTranslator(body | {"tools": []}).chat(template)
