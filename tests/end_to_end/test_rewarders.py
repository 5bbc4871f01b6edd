"""A real vLLM as a judge: a model that writes at random answers in the form that `rank` reads."""

from __future__ import annotations

import json

import pytest

from lightning_proxy.proxy.rewarders.rank import pattern_of
from support.whole_system import System

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("merged vllm"), pytest.mark.timeout(600)]


def test_any_model_ends_its_order_and_names_as_many_attempts_as_there_are(merged: System) -> None:
    body = {
        "model": "policy", "messages": [{"role": "user", "content": "order"}], "max_tokens": 900,
        "structured_outputs": {"regex": pattern_of("ABC")}, "temperature": 1, "n": 4,
    }  # fmt: skip
    answer = merged.call("POST", f"http://127.0.0.1:{merged.vllm_port}/v1/chat/completions", body)
    for choice in answer["choices"]:
        found = json.loads(choice["message"]["content"])
        assert found["reason"]
        assert len([letter for tie in found["order"] for letter in tie]) == 3
