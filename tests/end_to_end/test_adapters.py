"""Adapters on a real vLLM: a conversation with one, an exported one, and `doctor --learn` beside a running system."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract.real import System
from contract.system import free_port, write_config
from lightning_proxy.serving.operator import key_file, operator_headers
from lightning_proxy.serving.vllm import VllmServer, operator_session
from support.command_line import lightning
from support.token_continuity import Served, converse, two_proxies

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("lora vllm"), pytest.mark.timeout(900), pytest.mark.long]


@pytest.fixture(scope="module")
def served(lora: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with two_proxies(lora, tmp_path_factory.mktemp("adapted")) as found:
        yield found


async def exported(model: Path, directory: Path) -> Path:
    """A version that was trained, as the directory that `policy export` makes."""
    from support.training import bench  # imports torch

    async with bench(model, directory, "lora", learning_rate=2e-2) as b:
        await b.groups("t1", "t2")
        await b.loop(max_steps=1).run(asyncio.Event(), once=True)
        (directory / "config.yaml").write_text(yaml.safe_dump(b.config.model_dump(mode="json")))
    command = ("--config", directory / "config.yaml", "policy", "export", "1", directory / "adapter")
    assert (await asyncio.to_thread(lightning, *command, "--as", "adapter")).returncode == 0
    return directory / "adapter"


async def test_an_exported_adapter_is_served_as_it_was_trained(lora: System, speller: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompt = [5, 6, 7, 8]

    @torch.no_grad()
    def likeliest(model: Any) -> float:
        return float(model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1).max())

    adapter = await exported(speller, tmp_path)
    original = AutoModelForCausalLM.from_pretrained(speller)
    before, after = likeliest(original), likeliest(PeftModel.from_pretrained(original, adapter))
    assert abs(before - after) > 1e-2, "the step changed something that can be seen"
    body = {"model": "tuned", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 0}
    url, headers = f"http://127.0.0.1:{lora.vllm_port}/v1", operator_headers(lora.directory / "policy")
    async with operator_session() as session:
        server = VllmServer(session, url, headers)
        await server.load_adapters({"tuned": str(adapter)})
        async with session.post(f"{url}/completions", json=body, headers=headers) as answer:
            (logprob,) = (await answer.json())["choices"][0]["logprobs"]["token_logprobs"]
        await server.unload_adapters(["tuned"])
    assert logprob == pytest.approx(after, abs=1e-3)


def test_a_conversation_with_an_adapter_is_one_row_too(served: Served, speller: Path, tmp_path: Path) -> None:
    served.serve_adapter("exact", asyncio.run(exported(speller, tmp_path)))
    before = served.outcomes("exact")
    try:
        converse(served.client("exact", "adapted"), stream=True)
    finally:
        served.promote("exact", 0)
    assert served.rows("exact", "adapted") == 1
    assert {call.policy_version for call in served.calls("exact", "adapted")} == {1}
    after = served.outcomes("exact")
    assert {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k)} == {"first": 1, "exact": 3}


async def test_a_real_vllm_learns_and_is_left_as_it_was(lora: System, speller: Path, tmp_path: Path) -> None:
    url, policy = f"http://127.0.0.1:{lora.vllm_port}/v1", tmp_path / "policy"
    policy.mkdir()
    shutil.copy(key_file(lora.directory / "policy"), key_file(policy))
    own = {"model": str(speller), "publish": "lora"}
    write_config(tmp_path, url, free_port(), policy=own, trainer={"learning_rate": 1e-3})
    async with operator_session() as session:
        server = VllmServer(session, url, {})
        before = await server.adapters()
        done = await asyncio.to_thread(lightning, "--config", tmp_path / "config.yaml", "doctor", "--learn", "--json")
        assert await server.adapters() == before
    assert [check for check in done.json if check["outcome"] == "failed"] == [], done.stderr
