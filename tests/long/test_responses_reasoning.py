"""A real vLLM whose model thinks: its own /v1/responses, and its chat route as the proxy translates, must agree."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.responses_twice import assert_same, get
from support.tool_template import TEMPLATE
from support.whole_system import CLI, free_port, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Json = dict[str, Any]

NAME = "thinker"
THOUGHT = "<think>I see.\nTwo.</think>"
SAY = [{"role": "user", "content": "Say hello."}]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CUSTOM = '<tool_call>\n{"name": "patch", "arguments": {"input": "+ 😀"}}\n</tool_call>'
LOGPROBS = ["message.output_text.logprobs"]
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
    (["message"], said(THOUGHT + "Hello.", include_reasoning=False, include=LOGPROBS)),
    (["reasoning", "message"], said(THOUGHT + "Hello.", include=LOGPROBS, top_logprobs=1)),
    (["reasoning", "function_call"], said(THOUGHT + CALL, tools=[ADD])),
    (["reasoning", "message", "function_call"], said(THOUGHT + "So: " + CALL, tools=[ADD])),
    (["reasoning", "function_call", "function_call"], said(THOUGHT + CALL + CALL, tools=[ADD])),
    (["reasoning", "function_call"], said(THOUGHT + CALL + CALL, tools=[ADD], parallel_tool_calls=False)),
    (["reasoning", "custom_tool_call"], said(THOUGHT + CUSTOM, tools=[PATCH])),
    (["reasoning", "message"], said(THOUGHT + "Hello.", input=[*SAY, EARLIER, *SAY])),
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.thinking_model import save_thinking_model  # imports torch

    directory, port = tmp_path_factory.mktemp("thinking"), free_port()
    template, config = directory / "template.jinja", directory / "config.yaml"
    template.write_text(TEMPLATE.strip())
    model = save_thinking_model(directory / NAME)
    config.write_text(yaml.safe_dump(_settings(model, port, template)))
    with (directory / "vllm.log").open("wb") as log:
        server = subprocess.Popen([*CLI, "--config", str(config), "vllm"], stdout=log, stderr=log, cwd=directory)
    wait_until(lambda: server.poll() is not None or get(f"http://127.0.0.1:{port}/v1/models"), 480, "vLLM is there")
    yield f"http://127.0.0.1:{port}/v1"
    server.send_signal(signal.SIGINT)
    server.wait(60)


def _settings(model: Path, port: int, template: Path) -> Json:
    options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(template)]
    options += ["--reasoning-parser", "deepseek_r1", "--enable-prompt-tokens-details"]
    options += ["--structured-outputs-config", json.dumps({"enable_in_reasoning": True})]
    return {
        "upstreams": [{"name": "policy", "kind": "vllm", "base_url": f"http://127.0.0.1:{port}/v1"}],
        "policy": {"model": str(model), "publish": "merged"},
        "vllm": {"port": port, "max_model_len": 1024, "kv_cache_gib": 1, "extra_args": options},
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("items", "body"), CASES, ids=[json.dumps(body)[:70] for _, body in CASES])
def test_thoughts_agree(vllm: str, items: list[str], body: Json, stream: bool) -> None:
    asked = {"model": NAME, "temperature": 0, "max_output_tokens": 200, "input": SAY} | body
    answer = assert_same(vllm, asked | {"stream": stream})
    assert [item["type"] for item in answer["output"]] == items
