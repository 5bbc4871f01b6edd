"""Real vLLMs with models that think: their own routes for Messages and Responses, and chat as the proxy translates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_proxy.proxy.dialects.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import Template, Untranslatable
from support.models import TEMPLATE as TOOL_TEMPLATE
from support.served import own_vllm
from support.twice import assert_same, prompts, template_of
from support.twice import message_through_chat as through_chat
from support.twice import native_message as native

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Json = dict[str, Any]
WHOLE_OR_STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

# Messages

RECITER = "reciter"
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
HELLO: Json = {"messages": [{"role": "user", "content": "Say hello."}]}
INLINE: Json = {"messages": [*HELLO["messages"], {"role": "system", "content": "Be brief."}]}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
EARLIER: Json = {"messages": [{"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "Yes?"}]}]}
NOW = {"name": "now", "input_schema": {"properties": {}, "additionalProperties": False}, "strict": True}

MESSAGES: list[tuple[list[str], Json]] = [
    (["thinking", "text"], HELLO),
    (["thinking", "text"], HELLO | {"system": "Be kind.", "thinking": {"type": "adaptive", "display": "omitted"}}),
    (["thinking", "text"], HELLO | {"output_config": {"effort": "low"}}),
    (["thinking", "text"], HELLO | {"stop_sequences": ["ay"]}),
    (["thinking"], HELLO | {"stop_sequences": ["m"]}),
    (["thinking"], HELLO | {"max_tokens": 3}),
    (["thinking", "text"], INLINE | {"system": "Be kind."}),
    (["text"], INLINE | {"thinking": {"type": "disabled"}}),
    (["thinking", "text"], {"messages": [*HELLO["messages"], *EARLIER["messages"], *HELLO["messages"]]}),
    (["thinking", "tool_use"], HELLO | {"tools": [NOW], "tool_choice": {"type": "tool", "name": "now"}}),
]


@pytest.fixture(scope="module")
def reciting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.models import save_reciting_model  # imports torch

    directory = tmp_path_factory.mktemp("reciting")
    model = save_reciting_model(directory / RECITER, RECITED)
    with own_vllm(directory, model, TEMPLATE, "--reasoning-parser", "qwen3", "--enable-prompt-tokens-details") as url:
        yield url


@pytest.fixture(scope="module")
def template(reciting: str) -> Template:
    return template_of(reciting, RECITER)


def test_the_template_is_known(template: Template) -> None:
    assert template == Template(merges_system=True, disabled_effort="none", ignores_no_tools=False)


@WHOLE_OR_STREAM
@pytest.mark.parametrize(("blocks", "case"), MESSAGES, ids=[json.dumps(case)[:70] for _, case in MESSAGES])
def test_messages_agree(reciting: str, template: Template, blocks: list[str], case: Json, stream: bool) -> None:
    body = {"model": RECITER, "max_tokens": 70, "temperature": 0, "stream": stream} | case
    native(reciting, body)  # fills vLLM's cache, which `usage` tells
    status, answer = through_chat(reciting, body, template)
    assert (status, answer) == native(reciting, body)
    assert [block["type"] for block in (answer[-1] if stream else answer)["content"]] == blocks


def test_system_messages_are_moved_as_the_server_moves_them(reciting: str, template: Template) -> None:
    own, ours = prompts(reciting, {"model": RECITER, "max_tokens": 4, **INLINE, "system": "Be kind."}, template)
    assert ours == own and own[0] == 200


def test_an_empty_list_of_tools_that_the_template_shows_goes_to_its_own_route(template: Template) -> None:
    with pytest.raises(Untranslatable, match="list of tools"):
        MessagesTranslator({"model": RECITER, "max_tokens": 4, **HELLO, "tools": []}).chat(template)


# Responses

THINKER = "thinker"
THOUGHTS = "<think>I see.\nTwo.</think>"
SAY = [{"role": "user", "content": "Say hello."}]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CUSTOM = '<tool_call>\n{"name": "patch", "arguments": {"input": "+ 😀"}}\n</tool_call>'
BEFORE = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def said(text: str, **more: Any) -> Json:
    """The model says this and nothing else."""
    return {"structured_outputs": {"choice": [text]}} | more


RESPONSES: list[tuple[list[str], Json]] = [
    (["reasoning", "message"], said(THOUGHTS + "Hello.")),
    (["reasoning", "message"], said(THOUGHTS + "\n\nHello.", reasoning={"effort": "high"})),
    (["reasoning"], said("it never ends")),
    (["reasoning"], said(THOUGHTS)),
    (["reasoning"], said(THOUGHTS + "Hello.", max_output_tokens=4)),
    (["message"], said(THOUGHTS + "Hello.", include_reasoning=False)),
    (["reasoning", "function_call"], said(THOUGHTS + CALL, tools=[ADD])),
    (["reasoning", "message", "function_call"], said(THOUGHTS + "So: " + CALL, tools=[ADD])),
    (["reasoning", "function_call", "function_call"], said(THOUGHTS + CALL + CALL, tools=[ADD])),
    (["reasoning", "function_call"], said(THOUGHTS + CALL + CALL, tools=[ADD], parallel_tool_calls=False)),
    (["reasoning", "custom_tool_call"], said(THOUGHTS + CUSTOM, tools=[PATCH])),
    (["reasoning", "message"], said(THOUGHTS + "Hello.", input=[*SAY, BEFORE, *SAY])),
]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.models import save_thinking_model  # imports torch

    directory = tmp_path_factory.mktemp("thinking")
    options = ["--reasoning-parser", "deepseek_r1", "--enable-prompt-tokens-details"]
    options += ["--structured-outputs-config", json.dumps({"enable_in_reasoning": True})]
    with own_vllm(directory, save_thinking_model(directory / THINKER), TOOL_TEMPLATE, *options) as url:
        yield url


@WHOLE_OR_STREAM
@pytest.mark.parametrize(("items", "body"), RESPONSES, ids=[json.dumps(body)[:70] for _, body in RESPONSES])
def test_responses_agree(thinking: str, items: list[str], body: Json, stream: bool) -> None:
    asked = {"model": THINKER, "temperature": 0, "max_output_tokens": 200, "input": SAY} | body
    answer = assert_same(thinking, asked | {"stream": stream})
    assert [item["type"] for item in answer["output"]] == items
