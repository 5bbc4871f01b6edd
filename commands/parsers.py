"""Which parsers of vLLM's read a model's tool calls and its reasoning, for the families that are known."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AUTO, TOOL, REASONING = "--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"

# The first that fits a model's name counts: the tool parser, and the reasoning parser of a model that reasons.
FAMILIES: tuple[tuple[str, str | None, str | None], ...] = (
    (r"qwen3[-_.]?coder", "qwen3_coder", None),
    (r"qwen3\.[56]", "qwen3_coder", "qwen3"),
    (r"qwen3.*instruct", "hermes", None),
    (r"qwen3", "hermes", "qwen3"),
    (r"qwq", "hermes", "deepseek_r1"),
    (r"qwen2\.5|qwen2-", "hermes", None),
    (r"deepseek[-_]r1[-_]distill", None, "deepseek_r1"),
    (r"deepseek[-_]r1", "deepseek_v3", "deepseek_r1"),
    (r"deepseek[-_]v3\.1", "deepseek_v31", "deepseek_v3"),
    (r"deepseek[-_]v3\.2", "deepseek_v32", "deepseek_v3"),
    (r"deepseek[-_]v3", "deepseek_v3", None),
    (r"hermes", "hermes", None),
    (r"smollm3", "hermes", None),
    (r"llama[-_]?4", "llama4_pythonic", None),
    (r"llama[-_]?3\.[123].*instruct", "llama3_json", None),
    (r"magistral", "mistral", "mistral"),
    (r"(mistral|ministral|mixtral|devstral).*instruct|devstral", "mistral", None),
    (r"gpt[-_]oss", "openai", "openai_gptoss"),
    (r"glm[-_]4\.7", "glm47", "glm47"),
    (r"glm[-_]4\.[56]", "glm45", "glm45"),
    (r"kimi[-_]k2", "kimi_k2", "kimi_k2"),
    (r"minimax[-_]m2", "minimax_m2", "minimax_m2"),
    (r"granite[-_]4", "granite4", None),
    (r"granite[-_]3", "granite", None),
    (r"phi[-_]4[-_]mini[-_]instruct", "phi4_mini_json", None),
    (r"olmo[-_]?3", "olmo3", "olmo3"),
    (r"seed[-_]oss", "seed_oss", "seed_oss"),
    (r"functiongemma", "functiongemma", None),
)
# For a directory of another name: what its chat template tells a model to write.
WRITTEN = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"),
)


@dataclass(frozen=True, slots=True)
class Parsers:
    """vLLM's options for the model, and a warning; None if requests with tools are answered."""

    argv: tuple[str, ...]
    warning: str | None = None


def parsers_of(model: str, extra_args: Sequence[str]) -> Parsers:
    """Return the options for a Hugging Face id or a directory. Options in `vllm.extra_args` stay as they are."""
    given = {argument.partition("=")[0] for argument in extra_args}
    tool, reasoning = _known(model)
    argv: list[str] = []
    if tool is not None and not given & {AUTO, TOOL, f"--no-{AUTO[2:]}"}:
        argv += [AUTO, TOOL, tool]
    if reasoning is not None and REASONING not in given:
        argv += [REASONING, reasoning]
    if tool is not None or given & {AUTO, TOOL}:
        return Parsers(tuple(argv))
    problem = f"no tool parser is known for {model}: requests with tools will get HTTP 400"
    fix = f"agents without tools need none; for others add {AUTO} {TOOL} NAME to vllm.extra_args (docs/agents.md)"
    return Parsers(tuple(argv), f"{problem}; {fix}")


def _known(model: str) -> tuple[str | None, str | None]:
    path = Path(model)
    names = [path.resolve().name if path.is_dir() else model.rpartition("/")[2]]
    if path.is_dir():
        names.append(str(_read(path / "config.json").get("_name_or_path") or "").rpartition("/")[2])
    for name in names:
        for pattern, tool, reasoning in FAMILIES:
            if re.search(pattern, name.lower()):
                return tool, reasoning
    template = _template(path) if path.is_dir() else ""
    return next((tool for text, tool in WRITTEN if text in template), None), None


def _template(directory: Path) -> str:
    """The chat template of a model's directory; empty if it has none."""
    try:
        return (directory / "chat_template.jinja").read_text()
    except OSError:
        return str(_read(directory / "tokenizer_config.json").get("chat_template") or "")


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
