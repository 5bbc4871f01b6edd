"""Which of vLLM's parsers are chosen for a model, and that the installed vLLM has them."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_proxy.commands.vllm import FAMILIES, WRITTEN, parsers_of, vllm_program, without_tools
from lightning_proxy.core.config.root import Config


def tools(parser: str) -> list[str]:
    return ["--enable-auto-tool-choice", "--tool-call-parser", parser]


@pytest.mark.parametrize(
    ("model", "argv"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", tools("hermes")),
        ("Qwen/Qwen3-0.6B", [*tools("hermes"), "--reasoning-parser", "qwen3"]),
        ("Qwen/Qwen3-4B-Instruct-2507", tools("hermes")),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", tools("qwen3_coder")),
        ("meta-llama/Llama-3.2-1B-Instruct", tools("llama3_json")),
        ("mistralai/Mistral-7B-Instruct-v0.3", tools("mistral")),
        ("openai/gpt-oss-20b", [*tools("openai"), "--reasoning-parser", "openai_gptoss"]),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", ["--reasoning-parser", "deepseek_r1"]),
    ],
)
def test_known_families_get_their_parsers(model: str, argv: list[str]) -> None:
    assert parsers_of(model, ())[0] == argv


def test_an_unknown_model_is_warned_of_unless_the_user_names_a_parser() -> None:
    argv, warning = parsers_of("org/unheard-of", ())
    assert argv == [] and "requests with tools will get HTTP 400" in (warning or "")
    named = parsers_of("org/unheard-of", ("--enable-auto-tool-choice", "--tool-call-parser=pythonic"))
    assert named == ([], None)
    own, _ = parsers_of("Qwen/Qwen3-0.6B", ("--tool-call-parser", "qwen3_xml", "--enable-auto-tool-choice"))
    assert own == ["--reasoning-parser", "qwen3"]


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_directory_is_known_by_its_template(tmp_path: Path, where: str) -> None:
    model = tmp_path / "mine"
    model.mkdir()
    (model / "config.json").write_text("{}")
    text = "say <tool_call>{...}</tool_call>"
    (model / where).write_text(text if where.endswith("jinja") else json.dumps({"chat_template": text}))
    assert parsers_of(str(model), ())[0] == tools("hermes")
    config = Config.model_validate({"policy": {"model": str(model)}})
    assert "hermes" in vllm_program(config).argv
    assert without_tools(config) is None


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_has_these_parsers() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    registered = {
        kind: set(
            re.findall(r'^    "([\w-]+)": \(', (Path(spec.origin).parent / kind / "__init__.py").read_text(), re.M)
        )
        for kind in ("tool_parsers", "reasoning")
    }
    assert {tool for _, tool, _ in FAMILIES if tool} | {tool for _, tool in WRITTEN} <= registered["tool_parsers"]
    assert {reasoning for _, _, reasoning in FAMILIES if reasoning} <= registered["reasoning"]
