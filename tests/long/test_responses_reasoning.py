"""A real vLLM whose model thinks: its own /v1/responses, and its chat route as the proxy translates, must agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.models import TEMPLATE
from support.own_vllm import own_vllm
from support.responses_twice import assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Json = dict[str, Any]

NAME = "thinker"
THOUGHT = "<think>I see.\nTwo.</think>"
SAY = [{"role": "user", "content": "Say hello."}]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CUSTOM = '<tool_call>\n{"name": "patch", "arguments": {"input": "+ 😀"}}\n</tool_call>'
EARLIER = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def said(text: str, **more: Any) -> Json:
    """The model says this and nothing else."""
    return {"structured_outputs": {"choice": [text]}} | more


CASES: list[tuple[list[str], Json]] = [
    (["reasoning", "message"], said(THOUGHT + "Hello.")),
    (["reasoning", "message"], said(THOUGHT + "\n\nHello.", reasoning={"effort": "high"})),
    (["reasoning"], said("it never ends")),
    (["reasoning"], said(THOUGHT)),
    (["reasoning"], said(THOUGHT + "Hello.", max_output_tokens=4)),
    (["message"], said(THOUGHT + "Hello.", include_reasoning=False)),
    (["reasoning", "function_call"], said(THOUGHT + CALL, tools=[ADD])),
    (["reasoning", "message", "function_call"], said(THOUGHT + "So: " + CALL, tools=[ADD])),
    (["reasoning", "function_call", "function_call"], said(THOUGHT + CALL + CALL, tools=[ADD])),
    (["reasoning", "function_call"], said(THOUGHT + CALL + CALL, tools=[ADD], parallel_tool_calls=False)),
    (["reasoning", "custom_tool_call"], said(THOUGHT + CUSTOM, tools=[PATCH])),
    (["reasoning", "message"], said(THOUGHT + "Hello.", input=[*SAY, EARLIER, *SAY])),
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.models import save_thinking_model  # imports torch

    directory = tmp_path_factory.mktemp("thinking")
    options = ["--reasoning-parser", "deepseek_r1", "--enable-prompt-tokens-details"]
    options += ["--structured-outputs-config", json.dumps({"enable_in_reasoning": True})]
    with own_vllm(directory, save_thinking_model(directory / NAME), TEMPLATE, *options) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("items", "body"), CASES, ids=[json.dumps(body)[:70] for _, body in CASES])
def test_thoughts_agree(vllm: str, items: list[str], body: Json, stream: bool) -> None:
    asked = {"model": NAME, "temperature": 0, "max_output_tokens": 200, "input": SAY} | body
    answer = assert_same(vllm, asked | {"stream": stream})
    assert [item["type"] for item in answer["output"]] == items
