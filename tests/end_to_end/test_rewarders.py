"""A real vLLM as a judge: a model that writes at random answers in the form that `rank` reads."""

from __future__ import annotations

import json
import urllib.request

import pytest

from contract.real import System
from lightning_proxy.features.judge.model import pattern_of
from lightning_proxy.features.judge.rewarders import order_pattern

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(600)]


def test_any_model_ends_its_order_and_names_as_many_attempts_as_there_are(merged: System) -> None:
    body = {
        "model": "speller", "messages": [{"role": "user", "content": "order"}], "max_tokens": 900,
        "structured_outputs": {"regex": pattern_of("order", order_pattern("ABC"))}, "temperature": 1, "n": 4,
    }  # fmt: skip
    url, headers = f"http://127.0.0.1:{merged.vllm_port}/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as got:
        answer = json.load(got)
    for choice in answer["choices"]:
        found = json.loads(choice["message"]["content"])
        assert found["reason"]
        assert len([letter for tie in found["order"] for letter in tie]) == 3
