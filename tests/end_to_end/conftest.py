"""Two real systems that the tests share, one for each way of publishing: each starts vLLM once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.tool_template import TEMPLATE
from support.whole_system import AGENT, System

NAME = "speller"


@pytest.fixture(scope="session")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.spelling_model import save_spelling_model  # imports torch

    return save_spelling_model(tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="session")
def merged(speller: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system("merged", speller, tmp_path_factory.mktemp("merged")) as system:
        yield system


@pytest.fixture(scope="session")
def lora(speller: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system("lora", speller, tmp_path_factory.mktemp("lora")) as system:
        yield system


@contextmanager
def running_system(publish: str, model: Path, directory: Path) -> Iterator[System]:
    template = directory / "template.jinja"
    template.write_text(TEMPLATE.strip())
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(template)]
    trainer = {"eval": evaluation(directory)} if publish == "merged" else {}
    system = System(
        directory, model, publish, trainer, vllm={"max_model_len": 1024, "extra_args": tools}, others=other_upstreams
    )
    try:
        system.start()
        yield system
    finally:
        system.stop()


def evaluation(directory: Path) -> dict[str, Any]:
    """What new versions are evaluated with beside training."""
    agent, tasks = directory / "evaluated.py", directory / "held_out.jsonl"
    agent.write_text(AGENT)
    tasks.write_text("\n".join(json.dumps({"prompt": letter * 3}) for letter in "wxyz"))
    return {"tasks": str(tasks), "command": f"{sys.executable} {agent}", "every_steps": 2, "samples": 2}


def other_upstreams(vllm_port: int) -> list[dict[str, Any]]:
    """The same vLLM as other providers' models."""
    return [
        {
            "name": provider, "kind": "litellm", "base_url": f"http://127.0.0.1:{vllm_port}{path}",
            "api_key": "unused", "model_map": {provider: f"{provider}/{NAME}"},
        }
        for provider, path in (("hosted_vllm", "/v1"), ("anthropic", ""))
    ]  # fmt: skip
