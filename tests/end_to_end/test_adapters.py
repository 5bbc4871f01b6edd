"""Adapters on a real vLLM: a conversation with one, and `doctor --learn` next to a system that uses the server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from contract.real import System
from contract.system import CLI, free_port
from support.token_continuity import Served, converse, two_proxies


def save_adapter(model: Path, directory: Path, seed: int = 0) -> Path:
    """Files of an adapter of the model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(directory)
    return directory


pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("lora vllm"), pytest.mark.timeout(900), pytest.mark.long]


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


def test_a_real_vllm_learns_and_is_left_as_it_was(lora: System, speller: Path, tmp_path: Path) -> None:
    url, file = f"http://127.0.0.1:{lora.vllm_port}/v1", tmp_path / "config.yaml"
    (tmp_path / "policy").mkdir()
    shutil.copy(lora.directory / "policy" / "operator.key", tmp_path / "policy")
    settings = {
        "proxy": {"port": free_port()}, "store": {"url": f"sqlite:///{tmp_path}/store.db"},
        "upstreams": [{"name": "policy", "base_url": url}], "trainer": {"learning_rate": 1e-3},
        "policy": {"model": str(speller), "publish": "lora", "directory": f"{tmp_path}/policy"},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(settings))
    before = served(url)
    done = subprocess.run(
        [*CLI, "--config", str(file), "doctor", "--learn", "--json"],
        capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert [check for check in checks.values() if check["outcome"] == "failed"] == [], done.stderr
    assert done.returncode == 0
    assert {"ratios", "likelier", "new weights", "as before"} < checks.keys()
    assert served(url) == before
    assert not [*tmp_path.rglob("lightning-doctor*")]


def served(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/models", timeout=30) as answer:
        return {model["id"] for model in json.load(answer)["data"]}
