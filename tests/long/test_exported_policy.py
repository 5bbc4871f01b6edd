"""The adapter of an exported policy version is served by vLLM as it was trained."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from contract.system import CLI
from support.models import TEMPLATE, save_spelling_model
from support.served import own_vllm
from support.training import bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8]


async def export(base: Path, directory: Path) -> Path:
    """Train a version and export it; returns the directory with its adapter."""
    async with bench(base, directory, "lora", learning_rate=2e-2) as b:
        await b.groups("t1", "t2")
        await b.loop(max_steps=1).run(asyncio.Event(), once=True)
        (directory / "config.yaml").write_text(yaml.safe_dump(b.config.model_dump(mode="json")))
    command = [*CLI, "--config", str(directory / "config.yaml"), "policy", "export", "1", str(directory / "adapter")]
    subprocess.run([*command, "--as", "adapter"], check=True)
    return directory / "adapter"


def served(url: str, model: str) -> float:
    """The log-probability of the likeliest next token, as vLLM samples it."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    answer = httpx.post(f"{url}/completions", json=body, timeout=120, trust_env=False)
    return float(answer.json()["choices"][0]["logprobs"]["token_logprobs"][0])


@torch.no_grad()
def expected(model: Any) -> float:
    return float(model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1).max())


def test_the_adapter_is_served_as_it_was_trained(tmp_path: Path) -> None:
    base = save_spelling_model(tmp_path / "speller")
    adapter = asyncio.run(export(base, tmp_path))
    original = AutoModelForCausalLM.from_pretrained(base)
    before, after = expected(original), expected(PeftModel.from_pretrained(original, adapter))
    assert abs(before - after) > 1e-2, "the step changed something that can be seen"
    (tmp_path / "vllm").mkdir()
    options = ("--enable-lora", "--max-lora-rank", "64", "--lora-modules", f"tuned={adapter}")
    with own_vllm(tmp_path / "vllm", base, TEMPLATE, *options) as url:
        assert served(url, "tuned") == pytest.approx(after, abs=1e-3)
