"""`doctor --learn` on a real vLLM, next to a system that uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from contract.real import System
from contract.system import CLI, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("lora vllm"), pytest.mark.timeout(900), pytest.mark.long]


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
