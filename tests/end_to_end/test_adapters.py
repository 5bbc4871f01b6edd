"""Adapters on a real vLLM: several in one batch, and a conversation with one."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from contract.real import System
from lightning_proxy.serving.operator import operator_headers
from support.token_continuity import Served, converse, two_proxies


def save_adapter(model: Path, directory: Path, seed: int = 0) -> Path:
    """Files of an adapter of the model."""
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(directory)
    return directory


def logprobs_with(model: Path, adapter: Path, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Of each token of the answer."""
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    with torch.no_grad():
        logits = adapted(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return found


pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("lora vllm"), pytest.mark.timeout(900), pytest.mark.long]


def test_different_adapters_in_one_batch_answer_with_their_own_weights(
    lora: System, speller: Path, tmp_path: Path
) -> None:
    adapters = {name: save_adapter(speller, tmp_path / name, seed) for seed, name in enumerate(("one", "other"))}
    for name, path in adapters.items():
        post(lora, "load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda name: (name, ask(lora, name)), [*adapters] * 2))
    finally:
        for name in adapters:
            post(lora, "unload_lora_adapter", {"lora_name": name})
    for name, (prompt, answer, logprobs) in answers:
        for other, path in adapters.items():
            differences = [
                abs(a - b) for a, b in zip(logprobs, logprobs_with(speller, path, prompt, answer), strict=True)
            ]
            assert (max(differences) < 1e-3) == (other == name), (name, other, differences)


def ask(system: System, model: str) -> tuple[list[int], list[int], list[float]]:
    """The tokens of the prompt and of the answer, and the log-probabilities of the latter."""
    asked = {"model": model, "messages": [{"role": "user", "content": "Spell."}], "max_tokens": 64, "temperature": 1}
    said = json.loads(post(system, "chat/completions", asked | {"logprobs": True, "return_token_ids": True}))
    (choice,) = said["choices"]
    return said["prompt_token_ids"], choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]


def post(system: System, path: str, body: dict[str, Any]) -> bytes:
    url = f"http://127.0.0.1:{system.vllm_port}/v1/{path}"
    headers = {"Content-Type": "application/json"} | operator_headers(system.directory / "policy")
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: bytes = answer.read()
        return found


@pytest.fixture(scope="module")
def served_with_adapters(lora: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with two_proxies(lora, tmp_path_factory.mktemp("adapted")) as found:
        yield found


def test_a_conversation_with_an_adapter_is_one_row_too(
    served_with_adapters: Served, speller: Path, tmp_path: Path
) -> None:
    served = served_with_adapters
    served.serve_adapter("exact", save_adapter(speller, tmp_path / "v1"))
    before = served.outcomes("exact")
    try:
        converse(served.client("exact", "adapted"), stream=True)
    finally:
        served.promote("exact", 0)
    assert served.rows("exact", "adapted") == 1
    assert {call.policy_version for call in served.calls("exact", "adapted")} == {1}
    after = served.outcomes("exact")
    assert {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k)} == {"first": 1, "exact": 3}
