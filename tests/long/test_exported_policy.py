"""An exported policy version is served by vLLM as it was trained, in both forms."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from contract.system import CLI
from support.in_process import own_vllm
from support.models import TEMPLATE, save_spelling_model
from support.training import bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_spelling_model(tmp_path_factory.mktemp("model") / "speller")


@pytest.fixture(scope="module")
def exported(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with version 1 in both forms."""
    directory = tmp_path_factory.mktemp("exported")

    async def train() -> None:
        async with bench(base, directory, "lora", learning_rate=2e-2) as b:
            await b.groups("t1", "t2")
            await b.loop(max_steps=1).run(asyncio.Event(), once=True)
            (directory / "config.yaml").write_text(yaml.safe_dump(b.config.model_dump(mode="json")))

    asyncio.run(train())
    for form in ("adapter", "merged"):
        command = [*CLI, "--config", str(directory / "config.yaml"), "policy", "export", "1", str(directory / form)]
        subprocess.run([*command, "--as", form], check=True)
    return directory


def served(url: str, model: str) -> float:
    """The log-probability of the likeliest next token, as vLLM samples it."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return float(json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][0])


@torch.no_grad()
def expected(model: Any) -> float:
    return float(model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1).max())


def test_the_whole_model_is_served_as_it_was_trained(base: Path, exported: Path, tmp_path: Path) -> None:
    original = AutoModelForCausalLM.from_pretrained(base)
    before, after = expected(original), expected(PeftModel.from_pretrained(original, exported / "adapter"))
    assert abs(before - after) > 1e-2, "the step changed something that can be seen"
    with own_vllm(tmp_path, exported / "merged", TEMPLATE) as url:
        assert served(url, "merged") == pytest.approx(after, abs=1e-3)


def test_the_adapter_is_served_as_it_was_trained(base: Path, exported: Path, tmp_path: Path) -> None:
    after = expected(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), exported / "adapter"))
    options = ("--enable-lora", "--max-lora-rank", "64", "--lora-modules", f"tuned={exported / 'adapter'}")
    with own_vllm(tmp_path, base, TEMPLATE, *options) as url:
        assert served(url, "tuned") == pytest.approx(after, abs=1e-3)
