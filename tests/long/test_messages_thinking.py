"""A real vLLM whose model thinks, and whose template is unlike others: its own /v1/messages, and its chat route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_proxy.proxy.dialects.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import Template, Untranslatable
from support.messages_twice import native, prompts, template_of, through_chat
from support.own_vllm import own_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Json = dict[str, Any]

NAME = "reciter"
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

CASES: list[tuple[list[str], Json]] = [
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
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.models import save_reciting_model  # imports torch

    directory = tmp_path_factory.mktemp("reciting")
    model = save_reciting_model(directory / NAME, RECITED)
    with own_vllm(directory, model, TEMPLATE, "--reasoning-parser", "qwen3", "--enable-prompt-tokens-details") as url:
        yield url


@pytest.fixture(scope="module")
def template(vllm: str) -> Template:
    return template_of(vllm, NAME)


def test_the_template_is_known(template: Template) -> None:
    assert template == Template(merges_system=True, disabled_effort="none", ignores_no_tools=False)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("blocks", "case"), CASES, ids=[json.dumps(case)[:70] for _, case in CASES])
def test_thoughts_agree(vllm: str, template: Template, blocks: list[str], case: Json, stream: bool) -> None:
    body = {"model": NAME, "max_tokens": 70, "temperature": 0, "stream": stream} | case
    native(vllm, body)  # fills vLLM's cache, which `usage` tells
    status, answer = through_chat(vllm, body, template)
    assert (status, answer) == native(vllm, body)
    assert [block["type"] for block in (answer[-1] if stream else answer)["content"]] == blocks


def test_system_messages_are_moved_as_the_server_moves_them(vllm: str, template: Template) -> None:
    own, ours = prompts(vllm, {"model": NAME, "max_tokens": 4, **INLINE, "system": "Be kind."}, template)
    assert ours == own and own[0] == 200


def test_an_empty_list_of_tools_that_the_template_shows_goes_to_its_own_route(template: Template) -> None:
    with pytest.raises(Untranslatable, match="list of tools"):
        MessagesTranslator({"model": NAME, "max_tokens": 4, **HELLO, "tools": []}).chat(template)
